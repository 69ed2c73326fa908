"""The count sketch: a small table of sums from which the large elements of a vector can be estimated.

Each of `rows` rows has `columns` cells. In each row, every element is added, with a random sign, to a random cell. The
estimate of an element is the median over rows of its cells, each times its sign. Sketches are linear: the sum of the
workers' sketches is the sketch of their sum, so an all-reduce merges them.

Signs and columns are hashes of an element's index, computed on the fly. The hash is a cubic polynomial modulo 2^31 - 1
with random coefficients per row; its lowest bit is the sign, and the other bits are the column. The hashes of any four
elements are independent to within 2^-29, and so are their signs and columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire._checks import is_integer
from thinwire.compressors.codecs import AddingCodec
from thinwire.compressors.codecs._scratch import Scratch
from thinwire.kernels import rng
from thinwire.kernels.arguments.selections import sketch_top_k_scratch
from thinwire.kernels.ops import Kernels
from thinwire.transport.memory import HOST

MAX_ELEMENTS = rng.HASH_PRIME
"""The hash cannot distinguish more elements."""
MAX_ROWS = 15
MAX_COLUMNS = 2**30


class CountSketch(AddingCodec):
    """`rows x columns` float32 numbers, independent of the length of the vector.

    An estimate is within √(8/columns)·‖values‖₂ of the true value with probability 0.875 in one row, 0.984 for the
    median of five rows, and 0.993 for that of seven.

    Args:
        kernels: the backend.
        rows: the number of independent estimates per element; at most 15.
        columns: the number of cells per row; at most 2^30.
        seed: the seed of the hashes. Only sketches with the same seed can be added.

    Raises:
        ValueError: if `rows` or `columns` is out of range.
    """

    def __init__(self, kernels: Kernels, rows: int, columns: int, seed: int = 0) -> None:
        if not is_integer(rows, 1, MAX_ROWS):
            raise ValueError(f"rows={rows!r}: expected an integer from 1 to {MAX_ROWS}")
        if not is_integer(columns, 1, MAX_COLUMNS):
            raise ValueError(f"columns={columns!r}: expected an integer from 1 to 2**30")
        self._kernels = kernels
        self.rows, self.columns = rows, columns
        numbers = [[rng.hash_coefficient(seed, row, power) for power in range(4)] for row in range(rows)]
        self._coefficients = torch.tensor(numbers, dtype=torch.int64, device=HOST)
        self._scratch = Scratch()

    def nbytes(self, length: int) -> int:
        """See `Codec`."""
        return 8 * -(-self.rows * self.columns // 2)

    def encode(self, values: Tensor, packet: Tensor) -> None:
        """See `Codec`."""
        self._check(values, packet)
        packet.zero_()
        self.add(values, packet)

    def add(self, values: Tensor, packet: Tensor, first: int = 0) -> None:
        """Add elements to a sketch, of which the first has the index `first`, a multiple of 64."""
        self._kernels.sketch_add(values, self._table(packet), self._coefficients, first=first)

    def decode(self, packet: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """See `Codec`."""
        self._check(values, packet)
        self._kernels.sketch_estimate(self._table(packet), values, self._coefficients, first=0, weight=weight)

    def largest(self, packet: Tensor, peak: Tensor, ranges: Tensor, indices: Tensor) -> None:
        """Find the elements with the largest |estimate|/√peak, as many as `indices` holds; among equal ones, the first.

        Args:
            packet: the sketch.
            peak: for each element of the vector, the divisor of its squared estimate.
            ranges: (first, count) of the ranges to search, in order; each begins at a multiple of 64.
            indices: int32; receives the indices in ascending order.
        """
        table = self._table(packet)
        scratch = self._scratch.reserve(sketch_top_k_scratch(indices, table))
        self._kernels.sketch_top_k(table, peak, ranges, indices, scratch, coefficients=self._coefficients)

    def _table(self, packet: Tensor) -> Tensor:
        return packet.view(torch.float32)[: self.rows * self.columns].view(self.rows, self.columns)

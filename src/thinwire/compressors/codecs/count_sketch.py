"""The count sketch: a small table of sums from which the large elements of a vector can be read.

In each of `rows` rows every element is added, with a random sign, to a random one of `columns` cells. An element is
estimated by the median over rows of its cells, signs taken back. Sketches are linear: the sum of workers' sketches is
the sketch of their sum, so a plain all-reduce merges them.

Signs and columns are hashes of an element's index, computed on the fly: a cubic polynomial modulo 2^31 - 1 with random
coefficients a row, of which the lowest bit is the sign and the others are the column. Its values at any four elements
are independent (so signs are, and columns), to within 2^-29.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire._checks import is_integer
from thinwire.compressors.codecs import AddingCodec
from thinwire.compressors.codecs._scratch import Scratch
from thinwire.kernels import rng
from thinwire.kernels.ops import Kernels
from thinwire.transport.memory import HOST

MAX_ELEMENTS = rng.HASH_PRIME
"""Elements beyond it would not be told apart."""
MAX_ROWS = 15
MAX_COLUMNS = 2**30


class CountSketch(AddingCodec):
    """`rows x columns` float32 numbers, however long the vector is.

    An estimate is within √(8/columns)·‖values‖₂ of the truth with probability 0.875 in a row, so with 0.984 in the
    median of five rows and 0.993 in that of seven.

    Args:
        kernels: the backend.
        rows: how many independent estimates an element has; at most 15.
        columns: cells of a row; at most 2^30.
        seed: of the hashes. Only sketches of the same seed can be added.

    Raises:
        ValueError: when there is no row or column, or too many.
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
        """Let elements from `first` on, a multiple of 64, into a sketch."""
        self._kernels.sketch_add(values, self._table(packet), self._coefficients, first=first)

    def decode(self, packet: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """See `Codec`."""
        self._check(values, packet)
        self._kernels.sketch_estimate(self._table(packet), values, self._coefficients, first=0, weight=weight)

    def largest(self, packet: Tensor, peak: Tensor, ranges: Tensor, indices: Tensor) -> None:
        """Find as many elements as `indices` has room for, of which estimate/√peak is largest; of equal ones the first.

        Args:
            packet: the sketch.
            peak: for every element of the vector what its estimate is weighed by.
            ranges: (first, count) of the stretches to look at, in order; each begins at a multiple of 64.
            indices: int32, gets them in order.
        """
        scratch = self._scratch.for_(indices)
        self._kernels.sketch_top_k(self._table(packet), peak, ranges, indices, scratch, coefficients=self._coefficients)

    def _table(self, packet: Tensor) -> Tensor:
        return packet.view(torch.float32)[: self.rows * self.columns].view(self.rows, self.columns)

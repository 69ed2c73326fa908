"""Top-k: the index and the exact value of each of the largest elements; all others decode to zero."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire._checks import is_number
from thinwire.compressors.codecs import Codec, Projection
from thinwire.compressors.codecs._scratch import Scratch
from thinwire.compressors.codecs.dense import Floats
from thinwire.kernels.arguments.selections import top_k_scratch
from thinwire.kernels.ops import Kernels

_ENTRY_BYTES = 8


def check_ratio(ratio: float) -> None:
    """Reject a ratio that is not in (0, 1].

    Raises:
        ValueError: naming the argument.
    """
    if not is_number(ratio) or not 0 < ratio <= 1:
        raise ValueError(f"ratio={ratio!r}: expected a number in (0, 1], the fraction of elements that is sent")


def entries(ratio: float, length: int) -> int:
    """The number of elements that are sent of a vector."""
    return math.ceil(ratio * length)


class TopK(Projection):
    """Eight bytes for each of the largest elements; among equal elements, the first.

    An instance is not thread-safe.

    Args:
        kernels: the backend.
        ratio: the fraction of elements that is sent; their number is rounded up.
        times: a factor of that number, which is at most the number of elements.

    Raises:
        ValueError: if `ratio` is not in (0, 1].
    """

    def __init__(self, kernels: Kernels, ratio: float, times: int = 1) -> None:
        check_ratio(ratio)
        self._kernels = kernels
        self._ratio, self._times = ratio, times
        self._scratch = Scratch()

    def nbytes(self, length: int) -> int:
        """See `Codec`."""
        return _ENTRY_BYTES * self._count(length)

    def encode(self, values: Tensor, packet: Tensor) -> None:
        """See `Codec`."""
        self._check(values, packet)
        indices, amounts = self._entries(packet)
        self._kernels.top_k(values, indices, self._scratch.reserve(top_k_scratch(indices)))
        torch.index_select(values, 0, indices, out=amounts)

    def decode(self, packet: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """See `Codec`."""
        self._check(values, packet)
        indices, amounts = self._entries(packet)
        if not self._kernels.sparse_add(values, indices, amounts, weight=weight):
            raise ValueError(f"a top-k packet has an index beyond its {values.numel()} elements")

    def square_sum(self, packet: Tensor, length: int) -> float:
        """See `Projection`."""
        return float(self._kernels.square_sum(self._entries(packet)[1]))

    def _count(self, length: int) -> int:
        return min(self._times * entries(self._ratio, length), length)

    def _entries(self, packet: Tensor) -> tuple[Tensor, Tensor]:
        half = packet.numel() // 2
        return packet[:half].view(torch.int32), packet[half:].view(torch.float32)


class Union(Codec):
    """All elements that any of several top-k packets has, exactly: by index, or as a dense vector if that is smaller.

    An instance is not thread-safe.

    Args:
        kernels: the backend.
        ratio: that of the packets.
        packets: how many there are.

    Raises:
        ValueError: if `ratio` is not in (0, 1].
    """

    def __init__(self, kernels: Kernels, ratio: float, packets: int) -> None:
        # Only so many elements differ from zero, so the largest ones are all of them.
        self._sparse = TopK(kernels, ratio, packets)
        self._dense = Floats()

    def nbytes(self, length: int) -> int:
        """See `Codec`."""
        return self._codec(length).nbytes(length)

    def encode(self, values: Tensor, packet: Tensor) -> None:
        """See `Codec`."""
        self._codec(values.numel()).encode(values, packet)

    def decode(self, packet: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """See `Codec`."""
        self._codec(values.numel()).decode(packet, values, weight)

    def _codec(self, length: int) -> Codec:
        return min(self._sparse, self._dense, key=lambda codec: codec.nbytes(length))

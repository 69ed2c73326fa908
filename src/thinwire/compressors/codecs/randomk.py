"""Random-k: the values of a random subset of the elements, which sender and receiver draw alike."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.compressors.codecs import Projection, RandomCodec
from thinwire.compressors.codecs._blocks import whole_words
from thinwire.compressors.codecs.topk import check_ratio, entries
from thinwire.kernels import rng
from thinwire.kernels.ops import Kernels


class RandomK(RandomCodec, Projection):
    """Four bytes for each of k = ⌈ratio·length⌉ elements; no indices travel.

    The vector is cut into k ranges whose lengths differ by at most one, and one element of each is drawn. So drawing
    takes time in proportion to k, and no element is drawn twice. The elements of a range are equally likely.

    Args:
        kernels: the backend.
        ratio: the fraction of elements that is sent.

    Raises:
        ValueError: if `ratio` is not in (0, 1].
    """

    def __init__(self, kernels: Kernels, ratio: float) -> None:
        check_ratio(ratio)
        self._kernels = kernels
        self._ratio = ratio

    def nbytes(self, length: int) -> int:
        """See `Codec`."""
        return whole_words(torch.float32.itemsize * entries(self._ratio, length))

    def encode(self, values: Tensor, packet: Tensor) -> None:
        """See `Codec`."""
        self._check(values, packet)
        indices = self._indices(values.numel(), values.device)
        torch.index_select(values, 0, indices, out=self._amounts(packet, indices.numel()))

    def decode(self, packet: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """See `Codec`."""
        self._check(values, packet)
        indices = self._indices(values.numel(), values.device)
        inside = self._kernels.sparse_add(values, indices, self._amounts(packet, indices.numel()), weight=weight)
        assert inside, "the drawn indices are those of elements"

    def square_sum(self, packet: Tensor, length: int) -> float:
        """See `Projection`."""
        return float(self._kernels.square_sum(self._amounts(packet, entries(self._ratio, length))))

    def _amounts(self, packet: Tensor, count: int) -> Tensor:
        return packet.view(torch.float32)[:count]

    def _indices(self, length: int, device: torch.device) -> Tensor:
        count = entries(self._ratio, length)
        bounds = torch.arange(count + 1, device=device) * length // max(count, 1)
        drawn = rng.draw_range(self._shared_key, 0, count, device).to(torch.int64) & 0xFFFFFFFF
        return (bounds[:-1] + (drawn * bounds.diff() >> 32)).to(torch.int32)

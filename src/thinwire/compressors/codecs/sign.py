"""The scaled sign: one bit per element, and one scale for all of them.

A vector `c` becomes `s·sign(c)`; the sign of zero is positive. A packet holds the bits, followed by the scale in a
separate word. Optimizers encode with kernels that also update their state in the same pass, but write the same format.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from thinwire.compressors.codecs import Projection
from thinwire.kernels.modes import MarkovMode, Source
from thinwire.kernels.ops import Kernels
from thinwire.transport.layout import WORD
from thinwire.transport.memory import HOST

_WORD_BYTES = WORD // 8


class Sign(Projection):
    """One bit per element. The scale is ‖c‖₁/len, which minimizes the error.

    Args:
        kernels: the backend.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def nbytes(self, length: int) -> int:
        """See `Codec`."""
        return self.scale_at(length) + _WORD_BYTES

    def scale_at(self, length: int) -> int:
        """The byte offset of the scale, a float32, in a packet of `length` elements."""
        return _WORD_BYTES * _words(length)

    def signs_of(self, packets: Tensor, length: int) -> Tensor:
        """The words of signs of packets, whose bytes are the last dimension, of `length` elements each."""
        return packets[..., : self.scale_at(length)].view(torch.int64)

    def scales_of(self, packets: Tensor, length: int) -> Tensor:
        """The scale of each packet."""
        return self.block_scales_of(packets, length, 1)[..., 0]

    def block_scales_of(self, packets: Tensor, length: int, blocks: int) -> Tensor:
        """The scales of each packet with one scale per block, which begin where the scale of other packets is."""
        at = self.scale_at(length)
        return packets[..., at : at + blocks * torch.float32.itemsize].view(torch.float32)

    def encode(self, values: Tensor, packet: Tensor) -> None:
        """See `Codec`."""
        self._check(values, packet)
        length, words = values.numel(), _words(values.numel())
        device = values.device
        sums = torch.zeros(1, 3, dtype=torch.float64, device=device)
        no_bits = torch.zeros(words, dtype=torch.int64, device=device)
        self._kernels.markov_encode(
            _run(length),
            values,
            None,
            torch.zeros(words * WORD, dtype=torch.float32, device=device),
            torch.empty(words, dtype=torch.int64, device=device),
            torch.empty(words, dtype=torch.uint8, device=device),
            no_bits,
            ~no_bits,
            packet,
            sent_scales=torch.zeros(1, dtype=torch.float32, device=device),
            sums=sums,
            beta=0.0,
            weight=1.0,
            scale=1.0,
            shift=0,
            mode=MarkovMode.ORDINARY,
        )
        self.scales_of(packet, length).fill_(float(sums[0, 0]) / max(length, 1))

    def decode(self, packet: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """See `Codec`."""
        self._check(values, packet)
        add_signs(
            self._kernels,
            _run(values.numel()),
            values,
            packet,
            self.scales_of(packet, values.numel()).reshape(1) * weight,
            ~torch.zeros(_words(values.numel()), dtype=torch.int64, device=values.device),
        )

    def square_sum(self, packet: Tensor, length: int) -> float:
        """See `Projection`."""
        return float(self.scales_of(packet, length)) ** 2 * length


def add_signs(kernels: Kernels, runs: Tensor, values: Tensor, packets: Tensor, scales: Tensor, active: Tensor) -> None:
    """Add the signs of packets, times the scale of each run's shard, to the values that are `active`."""
    kernels.amsgrad_apply(
        runs,
        None,
        None,
        values,
        None,
        None,
        None,
        packets,
        scales,
        active,
        beta1=0.0,
        beta2=0.0,
        eps=0.0,
        rate=0.0,
        correction=0.0,
        decay=1.0,
        source=Source.SIGNS,
    )


def _words(length: int) -> int:
    return -(-length // WORD)


@functools.cache
def _run(length: int) -> Tensor:
    """One run that covers a whole vector."""
    return torch.tensor([[0, 0, length, 0, 0, 0]], dtype=torch.int64, device=HOST)

"""The scaled sign: one bit an element, and one scale for all of them.

A vector `c` becomes `s·sign(c)`, with the sign of zero positive. Its packet has the bits, and the scale in a word of
its own behind them. Optimizers encode while they read gradients, by kernels that do more than this in the same pass,
but what they write is this.
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
    """One bit an element. The scale is ‖c‖₁/len, with which least is left out.

    Args:
        kernels: the backend.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def nbytes(self, length: int) -> int:
        """See `Codec`."""
        return self.scale_at(length) + _WORD_BYTES

    def scale_at(self, length: int) -> int:
        """The byte at which the scale of so many elements stands, as a float32."""
        return _WORD_BYTES * _words(length)

    def signs_of(self, packets: Tensor, length: int) -> Tensor:
        """The words of packets of so many elements, which are bytes in the last dimension."""
        return packets[..., : self.scale_at(length)].view(torch.int64)

    def scales_of(self, packets: Tensor, length: int) -> Tensor:
        """The scale of each packet."""
        at = self.scale_at(length)
        return packets[..., at : at + torch.float32.itemsize].view(torch.float32)[..., 0]

    def encode(self, values: Tensor, packet: Tensor) -> None:
        """See `Codec`."""
        self._check(values, packet)
        length, words = values.numel(), _words(values.numel())
        device = values.device
        sums = torch.zeros(1, 3, dtype=torch.float64, device=device)
        nothing = torch.zeros(words, dtype=torch.int64, device=device)
        self._kernels.markov_encode(
            _run(length),
            values,
            None,
            torch.zeros(words * WORD, dtype=torch.float32, device=device),
            torch.empty(words, dtype=torch.int64, device=device),
            torch.empty(words, dtype=torch.uint8, device=device),
            nothing,
            ~nothing,
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
    """Add a packet's signs, times the scale of each run's shard, to those values that are `active`."""
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
    """All of a vector, as kernels want to be told."""
    return torch.tensor([[0, 0, length, 0, 0, 0]], dtype=torch.int64, device=HOST)

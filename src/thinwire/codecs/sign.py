"""The scaled sign: one bit an element, and one scale for all of them.

A vector `c` becomes `s·sign(c)`, with the sign of zero positive. Its packet has the bits, and the scale in a word of
its own behind them. Optimizers encode while they read gradients, by kernels that do more than this in the same pass,
but what they write is this.
"""

from __future__ import annotations

import math
import struct
from typing import Literal

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.kernels.ops import Kernels
from thinwire.kernels.reference.amsgrad import SIGNS
from thinwire.kernels.reference.markov import ORDINARY

_WORD = 64
_WORD_BYTES = 8
SCALE = struct.Struct("<f")

Norm = Literal["l1", "l2"]


def nbytes(length: int) -> int:
    """How many bytes the signs of so many elements and their scale take."""
    return scale_at(length) + _WORD_BYTES


def scale_at(length: int) -> int:
    """The byte at which the scale of so many elements stands."""
    return _WORD_BYTES * _words(length)


def signs_of(packets: Tensor, length: int) -> Tensor:
    """The words of packets of so many elements, which are bytes in the last dimension."""
    return packets[..., : scale_at(length)].view(torch.int64)


def scales_of(packets: Tensor, length: int) -> Tensor:
    """The scale of each packet."""
    at = scale_at(length)
    return packets[..., at : at + SCALE.size].view(torch.float32)[..., 0]


class Sign(Codec):
    """One bit an element.

    Args:
        kernels: the backend.
        norm: of which the scale is made: "l1" for ‖c‖₁/len, with which the error is smallest, or "l2" for ‖c‖₂/√len,
            which keeps the length.
    """

    def __init__(self, kernels: Kernels, norm: Norm = "l1") -> None:
        self._kernels = kernels
        self._norm: Norm = norm

    def nbytes(self, length: int) -> int:
        """See `Codec`."""
        return nbytes(length)

    def encode(self, values: Tensor, packet: Tensor) -> None:
        """See `Codec`."""
        length, words = values.numel(), _words(values.numel())
        sums = torch.zeros(1, 3, dtype=torch.float64)
        nothing = torch.zeros(words, dtype=torch.int64)
        self._kernels.markov_encode(
            _run(length),
            values,
            None,
            torch.zeros(words * _WORD, dtype=torch.float32),
            torch.empty(words, dtype=torch.int64),
            nothing,
            ~nothing,
            packet,
            sent_scales=torch.zeros(1, dtype=torch.float32),
            sums=sums,
            beta=0.0,
            weight=1.0,
            scale=1.0,
            shift=0,
            mode=ORDINARY,
        )
        total, squares, _ = sums[0].tolist()
        scale = total / max(length, 1) if self._norm == "l1" else math.sqrt(squares / max(length, 1))
        scales_of(packet, length).fill_(scale)

    def decode(self, packet: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """See `Codec`."""
        words = _words(values.numel())
        self._kernels.amsgrad_apply(
            _run(values.numel()),
            None,
            None,
            values,
            None,
            None,
            None,
            packet,
            scales_of(packet, values.numel()).reshape(1) * weight,
            ~torch.zeros(words, dtype=torch.int64),
            beta1=0.0,
            beta2=0.0,
            eps=0.0,
            rate=0.0,
            correction=0.0,
            decay=1.0,
            source=SIGNS,
        )


def _words(length: int) -> int:
    return -(-length // _WORD)


def _run(length: int) -> Tensor:
    """All of a vector, as kernels want to be told."""
    return torch.tensor([[0, 0, length, 0, 0, 0]], dtype=torch.int64)

"""Natural compression: each element becomes a power of two, of which the sign and the exponent are sent.

A packet has one byte per element, the exponent as float32 has it, and then one bit per element, the sign. The exponent
0 stands for zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thinwire.compressors.codecs import RandomCodec
from thinwire.compressors.codecs._blocks import pack, packed_bytes, pieces, unpack, whole_words
from thinwire.kernels import rng

BITS = 9
_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_LARGEST = 254
"""The exponent of the largest finite numbers."""


class Natural(RandomCodec):
    """Rounds each element to one of the two powers of two around it, at random: E[decoded] = values.

    Numbers below 2^-126 become zero. The variance is at most an eighth of the squared norm.
    """

    def nbytes(self, length: int) -> int:
        """See `Codec`."""
        return whole_words(length + packed_bytes(length, 1))

    def encode(self, values: Tensor, packet: Tensor) -> None:
        """See `Codec`."""
        self._check(values, packet)
        for first, exponents, signs, piece in self._pieces(packet, values):
            numbers = piece.view(torch.int32)
            random = rng.draw_range(self._own_key, first, first + piece.numel(), values.device)
            random.bitwise_right_shift_(32 - _MANTISSA_BITS).bitwise_and_(_MANTISSA)
            lower = (numbers >> _MANTISSA_BITS).bitwise_and_(0xFF)
            exponent = lower.add(random < numbers & _MANTISSA).mul_(lower > 0)  # smaller numbers become zero
            exponents.copy_(exponent.clamp_(max=_LARGEST))
            pack((numbers < 0).view(torch.uint8), 1, signs)

    def decode(self, packet: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """See `Codec`."""
        self._check(values, packet)
        if bool((packet[: values.numel()] > _LARGEST).any()):
            raise ValueError(f"a packet of powers of two has an exponent above {_LARGEST}")
        for _, exponents, signs, piece in self._pieces(packet, values):
            negative = unpack(signs, 1, piece.numel()).to(torch.int32).bitwise_left_shift_(31)
            powers = exponents.to(torch.int32).bitwise_left_shift_(_MANTISSA_BITS).bitwise_or_(negative)
            piece.add_(powers.view(torch.float32), alpha=weight)

    def _pieces(self, packet: Tensor, values: Tensor) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """For each piece of a vector its first element, exponents, signs and values."""
        length = values.numel()
        signs = packet[length : length + packed_bytes(length, 1)]
        for first, last in pieces(length):
            yield first, packet[first:last], signs[first // 8 : packed_bytes(last, 1)], values[first:last]

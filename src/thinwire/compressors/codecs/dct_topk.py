"""The largest cosine coefficients of each chunk of 4,096, with indices of 12 bits and values of 8 bits.

A packet has one float32 scale per chunk, then the indices of all chunks, two in three bytes, and then the values, a
signed byte each. A value is a multiple of the scale, from -127 to 127. A chunk that the vector does not fill is filled
up with zeros.

The transform is a table of integers. A sum of products of those integers and the values has less than 53 bits, so
float64 holds it exactly, and every machine decodes the same bits, in whatever order it adds.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from thinwire._checks import is_integer
from thinwire.compressors.codecs import Codec
from thinwire.compressors.codecs._blocks import in_blocks, pack_twelve_bits, unpack_twelve_bits
from thinwire.compressors.codecs._entries import CHUNK, Entries
from thinwire.transport.memory import HOST

SIDE = 64
"""Of a chunk, as a matrix."""
VALUE_BITS = 8
_LARGEST = 127
_TABLE_BITS = 19
"""Entries of the table are multiples of 2 to the power of -19, and at most √(2/64): they have 17 bits."""


def check_entries(k: int) -> None:
    """Reject a number of entries per chunk that cannot be packed.

    Raises:
        ValueError: naming the argument.
    """
    if not is_integer(k, 2, CHUNK) or k % 2:
        raise ValueError(f"k={k!r}: expected an even number from 2 to {CHUNK}, the coefficients sent of each {CHUNK}")


class DctTopK(Codec):
    """Of each chunk, as a matrix X of 64 rows, the k largest elements of C·X·Cᵀ, where C is the cosine transform
    (DCT-II) with orthogonal rows.

    The error is at most what the smaller coefficients are, plus half a scale for each that is sent: the transform is
    rounded to 19 bits, which adds 10⁻⁵ of the largest coefficient.

    Args:
        k: the number of coefficients per chunk, an even number.

    Raises:
        ValueError: if `k` is out of range.
    """

    def __init__(self, k: int) -> None:
        check_entries(k)
        self._k, self._entries = k, Entries(k, VALUE_BITS)

    def nbytes(self, length: int) -> int:
        """See `Codec`."""
        return self._entries.nbytes(length)

    def encode(self, values: Tensor, packet: Tensor) -> None:
        """See `Codec`."""
        self._check(values, packet)
        scales, packed_indices, codes = self._entries.sections(packet, values.numel())
        table = _table(values.device)
        squares = in_blocks(values, CHUNK).view(-1, SIDE, SIDE).to(torch.float64)
        coefficients = (table @ squares @ table.T).view(-1, CHUNK) * 4.0**-_TABLE_BITS
        indices = coefficients.abs().topk(self._k, dim=1, sorted=False).indices
        entries = coefficients.gather(1, indices)
        scales.copy_(entries.abs().amax(1) / _LARGEST)
        # A chunk of zeros has the scale 0. The scale has been rounded, so the largest may be a little above 127.
        exact = entries / scales.to(torch.float64).clamp_(min=torch.finfo(torch.float32).tiny)[:, None]
        codes.view(torch.int8).copy_(exact.round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8).view(-1))
        pack_twelve_bits(indices.view(-1), packed_indices)

    def decode(self, packet: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """See `Codec`."""
        self._check(values, packet)
        length = values.numel()
        scales, packed_indices, codes = self._entries.sections(packet, length)
        places = unpack_twelve_bits(packed_indices).view(-1, self._k)
        coefficients = torch.zeros(scales.numel(), CHUNK, dtype=torch.float64, device=values.device)
        coefficients.scatter_(1, places, codes.view(torch.int8).view(-1, self._k).to(torch.float64))
        table = _table(values.device)
        squares = (table.T @ coefficients.view(-1, SIDE, SIDE) @ table).view(-1, CHUNK)
        decoded = squares.mul_(scales.to(torch.float64)[:, None] * 4.0**-_TABLE_BITS).to(torch.float32)
        values.add_(decoded.view(-1)[:length].mul_(weight))


@functools.cache
def _table(device: torch.device) -> Tensor:
    """The cosine transform times 2 to the power of 19, rounded: row h has √(2/64)·cos(π·(x + 1/2)·h/64), and 1/8 in the
    first. Exact integers, as float64."""
    places = torch.arange(SIDE, dtype=torch.float64, device=HOST)
    table = math.sqrt(2 / SIDE) * torch.cos(math.pi / SIDE * places[:, None] * (places + 0.5))
    table[0] = 1 / math.sqrt(SIDE)
    return (table * 2.0**_TABLE_BITS).round_().to(device)

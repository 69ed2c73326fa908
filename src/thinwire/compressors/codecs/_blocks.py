"""Vectors in blocks and in pieces, and small codes packed into bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from thinwire.transport.memory import HOST

_BYTE = 8
_FLOAT_BYTES = torch.float32.itemsize


def block_count(length: int, block: int) -> int:
    """The number of blocks of a vector, of which the last may be shorter."""
    return -(-length // block)


def in_blocks(values: Tensor, block: int) -> Tensor:
    """A vector as rows of `block` elements, the last filled up with zeros: a view if possible."""
    rows = block_count(values.numel(), block)
    missing = rows * block - values.numel()
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(rows, block)


def block_lengths(length: int, block: int, device: torch.device) -> Tensor:
    """The number of elements of each block, as float32."""
    lengths = torch.full((block_count(length, block),), float(block), device=device)
    if length % block:
        lengths[-1] = length % block
    return lengths


class Sections:
    """Packets of some float32 numbers per block, and then a code per element.

    Args:
        block: the number of elements in a block.
        numbers: of a block.
        width: the bits of a code.
    """

    def __init__(self, block: int, numbers: int, width: int) -> None:
        self._block, self._numbers, self._width = block, numbers, width

    def nbytes(self, length: int) -> int:
        """See `Codec`."""
        numbers = self._numbers * block_count(length, self._block)
        return whole_words(_FLOAT_BYTES * numbers + packed_bytes(length, self._width))

    def pieces(self, packet: Tensor, values: Tensor) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """For each piece of a vector its first element, the numbers of its blocks in rows, its codes and its values."""
        length, block = values.numel(), self._block
        rows = block_count(length, block)
        codes_at = _FLOAT_BYTES * self._numbers * rows
        numbers = packet[:codes_at].view(torch.float32).view(rows, self._numbers)
        codes = packet[codes_at : codes_at + packed_bytes(length, self._width)]
        for first, last in pieces(length, block):
            of_blocks = numbers[first // block : block_count(last, block)]
            of_codes = codes[packed_bytes(first, self._width) : packed_bytes(last, self._width)]
            yield first, of_blocks, of_codes, values[first:last]


def packed_bytes(length: int, width: int) -> int:
    """The number of bytes of `length` codes of `width` bits: 1, 2, 4 or 8."""
    return -(-length * width // _BYTE)


_PIECE = 1 << 15
"""About so many elements are encoded or decoded at a time, so that temporaries stay in the cache."""


def pieces(length: int, block: int = 1) -> Iterator[tuple[int, int]]:
    """The first and the last + 1 element of pieces of a vector. They begin at whole blocks and whole bytes of codes."""
    size = _BYTE * block * max(1, _PIECE // (_BYTE * block))
    return ((first, min(first + size, length)) for first in range(0, length, size))


_WHOLE = {1: torch.int64, 2: torch.int32, 4: torch.int16}
"""By the width of codes, the integers with one byte for each code of a packed byte."""


def pack(codes: Tensor, width: int, into: Tensor) -> None:
    """Pack a vector of uint8 codes below 2**width into bytes, the first code in the lowest bits."""
    if width == _BYTE:
        into.copy_(codes)
        return
    whole = in_blocks(codes, _BYTE // width).view(_WHOLE[width]).view(-1)
    shift = _BYTE - width
    for _ in range(3 if width == 1 else 2 if width == 2 else 1):  # joins pairs, then pairs of pairs, ...
        whole = whole | whole >> shift
        shift *= 2
    into.copy_(whole)  # only the lowest byte


def unpack(packed: Tensor, width: int, length: int) -> Tensor:
    """The first `length` codes, as uint8."""
    if width == _BYTE:
        return packed[:length]
    table = _codes_of_bytes(width).to(packed.device)
    return table.index_select(0, packed.to(torch.int32)).view(torch.uint8)[:length]


@functools.cache
def _codes_of_bytes(width: int) -> Tensor:
    """For each byte its codes, in the bytes of one integer."""
    shifts = torch.arange(0, _BYTE, width, device=HOST)
    codes = torch.arange(1 << _BYTE, device=HOST)[:, None] >> shifts & (1 << width) - 1
    return codes.to(torch.uint8).view(_WHOLE[width]).view(-1)


def pack_twelve_bits(numbers: Tensor, into: Tensor) -> None:
    """Pack an even number of int64 numbers below 4096 into bytes, two in three."""
    pairs, three = numbers.view(-1, 2), into.view(-1, 3)
    three[:, 0] = pairs[:, 0] & 0xFF
    three[:, 1] = pairs[:, 0] >> 8 | (pairs[:, 1] & 0xF) << 4
    three[:, 2] = pairs[:, 1] >> 4


def unpack_twelve_bits(packed: Tensor) -> Tensor:
    """What `pack_twelve_bits` packed, as int64."""
    three = packed.view(-1, 3).to(torch.int64)
    pairs = torch.stack([three[:, 0] | (three[:, 1] & 0xF) << 8, three[:, 1] >> 4 | three[:, 2] << 4], dim=1)
    return pairs.view(-1)


def whole_words(nbytes: int) -> int:
    """A number of bytes, rounded up to a multiple of 8."""
    return -(-nbytes // 8) * 8

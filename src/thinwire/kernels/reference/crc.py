"""CRC-32C, the checksum of packets: the remainder of a polynomial over GF(2) by Castagnoli's.

A polynomial is an integer whose highest of 32 bits is the coefficient of x^0; bytes stand as they are in the lowest 8.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from thinwire.kernels import arguments

CASTAGNOLI = 0x82F63B78
INVERTED = 0xFFFFFFFF
_TOGETHER = 1 << 20
"""Bytes whose remainders, of 8 bytes each, are held at once."""


def crc32c(data: Tensor, crc: int = 0) -> int:
    """The CRC of the bytes `data`, a contiguous row, that follow others, whose CRC is `crc`; 0 where none do.

    As RFC 3720 has it: bits are inverted before the first byte and after the last.
    """
    arguments.crc32c(data, crc, data.device)
    remainder = crc ^ INVERTED
    for piece in data.split(_TOGETHER):
        remainder = product(remainder, power_of_x(8 * piece.numel())) ^ _remainder(piece)
    return remainder ^ INVERTED


def _remainder(data: Tensor) -> int:
    """What bytes leave when nothing comes before them: one by one, by twos, by fours, all of a size at once."""
    remainders, size = _moved(data.long(), 1), 1
    while remainders.numel() > 1:
        if remainders.numel() % 2:
            remainders = torch.cat([remainders.new_zeros(1), remainders])  # zeros before the first leave nothing
        remainders = _moved(remainders[0::2], size) ^ remainders[1::2]
        size *= 2
    return int(remainders.sum())  # of one; or of none


def _moved(remainders: Tensor, distance: int) -> Tensor:
    """What is left of remainders when so many bytes of zeros follow, looked up byte by byte."""
    moved = torch.zeros_like(remainders)
    for at, table in enumerate(_tables(distance)):
        moved ^= table.to(remainders.device).index_select(0, (remainders >> 8 * at) & 0xFF)
    return moved


@cache
def _tables(distance: int) -> Tensor:
    """For the four bytes of a remainder: what is left of each of their 256 values when so many zeros follow."""
    factor, values = power_of_x(8 * distance), torch.arange(256, device="cpu")
    tables = torch.zeros((4, 256), dtype=torch.int64, device="cpu")
    for bit in range(32):
        tables[bit // 8] ^= ((values >> bit % 8) & 1) * product(1 << bit, factor)
    return tables


def product(a: int, b: int) -> int:
    """Of two polynomials, modulo the one that checksums are made by."""
    total = 0
    for power in range(32):
        if a >> (31 - power) & 1:
            total ^= b
        b = b >> 1 ^ (CASTAGNOLI if b & 1 else 0)
    return total


def power_of_x(n: int) -> int:
    """Of the polynomial x, modulo the same one."""
    power, square = 1 << 31, 1 << 30
    while n:
        if n & 1:
            power = product(power, square)
        square, n = product(square, square), n >> 1
    return power

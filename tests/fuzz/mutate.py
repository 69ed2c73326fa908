"""Damage of the kinds that networks, disks and people do, drawn from a generator of random numbers."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Callable

LIMITS = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
"""Where integers of some size end."""


def flip_bits(draw: random.Random, data: bytearray) -> None:
    """One bit, mostly, or a few."""
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8, 32))):
        bit = draw.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8


def overwrite(draw: random.Random, data: bytearray) -> None:
    """A burst of any bytes, or of equal ones."""
    size = min(len(data), draw.choice((1, 2, 4, 8, 16, 64)))
    at = draw.randrange(len(data) - size + 1)
    data[at : at + size] = draw.choice((draw.randbytes(size), bytes(size), b"\xff" * size))


def put_limit(draw: random.Random, data: bytearray) -> None:
    """An integer at one of its limits, at a multiple of its size."""
    size = draw.choice([size for size in (1, 2, 4, 8) if size <= len(data)])
    at = size * draw.randrange(len(data) // size)
    data[at : at + size] = (draw.choice(LIMITS) % 2 ** (8 * size)).to_bytes(size, "little")


def swap(draw: random.Random, data: bytearray) -> None:
    """Two fields change places."""
    size = draw.choice([size for size in (1, 2, 4, 8) if 2 * size <= len(data)] or [1])
    first, second = (size * draw.randrange(len(data) // size) for _ in range(2))
    data[first : first + size], data[second : second + size] = data[second : second + size], data[first : first + size]


def move(draw: random.Random, data: bytearray) -> None:
    """Everything from somewhere on comes a few bytes later; the length stays."""
    at, size = draw.randrange(len(data)), draw.randrange(1, 9)
    data[at:] = (draw.randbytes(size) + data[at:])[: len(data) - at]


WITHIN: list[Callable[[random.Random, bytearray], None]] = [flip_bits, flip_bits, overwrite, put_limit, swap, move]
"""Damage that leaves the length as it is."""


def damaged(draw: random.Random, data: bytes) -> bytes:
    """The same length, altered once or a few times, perhaps back to what it was."""
    altered = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        draw.choice(WITHIN)(draw, altered)
    return bytes(altered)


def damaged_file(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """A file that was cut off, extended, mixed with another one, or altered."""
    if not data:
        return draw.randbytes(8)
    at = draw.randrange(len(data))
    kind = draw.randrange(8)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data + draw.choice((draw.randbytes(draw.randrange(1, 64)), bytes(512), data))
    if kind == 2:
        return data[:at] + other[draw.randrange(len(other) + 1) :]
    if kind == 3:
        size = min(draw.choice((1, 4, 32, 512)), len(data) - at)
        return data[:at] + draw.choice((b"", 2 * data[at : at + size])) + data[at + size :]
    return damaged(draw, data)


# Numbers -------------------------------------------------------------------------------------------------------------

_SPECIAL = [
    *(struct.pack("<I", bits) for bits in (0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7FFFFFFF, 0x7F800001)),
    *(struct.pack("<f", value) for value in (3.4e38, -3.4e38, 1e-45, 0.0, -0.0, 1.0, -1.0, 2.0**60, -(2.0**64), 1e19)),
]
"""Floats that are not finite, or hardly so."""
_POOL = 1 << 14


def _pools() -> list[bytes]:
    draw = random.Random(0)
    cells = range(_POOL // 4)
    special = [draw.choice(_SPECIAL) for _ in cells]
    ordinary = [struct.pack("<f", draw.gauss(0, 1)) for _ in cells]
    some = [draw.choice((*_SPECIAL, cell, cell, cell)) for cell in ordinary]
    near = [struct.pack("<i", draw.choice((-1, 0, 1, 63, 64, draw.randrange(300), draw.randrange(70)))) for _ in cells]
    far = [struct.pack("<I", draw.choice(LIMITS) % 2**32) for _ in cells]
    lists = (special, ordinary, some, near, near, far)
    return [draw.randbytes(_POOL), bytes(_POOL), b"\xff" * _POOL, *(b"".join(pool) for pool in lists)]


_POOLS = _pools()


def hostile(draw: random.Random, size: int) -> bytes:
    """A payload of any contents: words, floats and indices of all kinds, which change along the way."""
    # Signs come first and a scale behind them, or indices first and values behind them.
    edges = sorted(
        (0, size, size // 2 if draw.random() < 0.5 else 4 * draw.randrange(size // 4 + 1), max(0, size - 24))
    )
    pieces = bytearray()
    for begin, end in itertools.pairwise(edges):
        while begin < end:
            at = 4 * draw.randrange(_POOL // 8)
            piece = draw.choice(_POOLS)[at : at + end - begin]
            pieces += piece
            begin += len(piece)
    return bytes(pieces)

"""Quantised blocks, literally: one block after another, in NumPy, from docs/protocol.md."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]


def encode(c: Floats, bits: int, block: int, spread: float) -> tuple[Codes, Floats, Floats]:
    """The codes, the scales and the values of `c`, which starts at a word: a code and a value per element, a scale per
    block. The last block can be shorter."""
    codes, scales, values = np.zeros(c.size, np.uint8), [], np.zeros(c.size, np.float32)
    for start in range(0, c.size, block):
        here = slice(start, min(start + block, c.size))
        if bits >= 3:
            codes[here], scale, values[here] = with_zero(c[here], 2 ** (bits - 1) - 1)
        else:
            codes[here], scale, values[here] = without_zero(c[here], bits, block, spread)
        scales.append(scale)
    return codes, np.array(scales, np.float32), values


def with_zero(c: Floats, top: int) -> tuple[npt.NDArray[np.int64], np.float32, Floats]:
    """A block whose levels are the scale times -top, ..., 0, ..., top."""
    scale, inverse = stored(np.abs(c).max() / np.float32(top))
    level = np.clip(np.rint(c * inverse), -top, top).astype(np.int64)
    return level + top, scale, level.astype(np.float32) * scale


def without_zero(c: Floats, bits: int, block: int, spread: float) -> tuple[npt.NDArray[np.int64], np.float32, Floats]:
    """A block whose levels are the scale times ±1/2, and with two bits ±3/2."""
    sizes = np.zeros(block, np.float32)
    sizes[: c.size] = np.abs(c)
    while sizes.size > 1:
        sizes = sizes[: sizes.size // 2] + sizes[sizes.size // 2 :]
    scale, inverse = stored(np.float32(spread) * (sizes[0] / np.float32(c.size)))
    code = np.clip(np.floor(c * inverse).astype(np.int64) + 2 ** (bits - 1), 0, 2**bits - 1)
    return code, scale, (code - (2**bits - 1) / 2).astype(np.float32) * scale


def stored(raw: np.float32) -> tuple[np.float32, np.float32]:
    """A scale as packets have it, rounded to bfloat16, and its inverse."""
    if raw < 2.0**-120:
        return np.float32(0), np.float32(0)
    number = int(np.float32(raw).view(np.uint32))
    number += 0x7FFF + (number >> 16) % 2  # to the nearest, and from the middle to the even one
    scale = np.uint32(number >> 16 << 16).view(np.float32)
    return scale, np.float32(1) / scale


def packed(codes: Codes, scales: Floats, bits: int, block: int) -> bytes:
    """One word as it is in a packet; `codes` has 64, `scales` one per block."""
    word = b"".join((int(scale.view(np.uint32)) >> 16).to_bytes(2, "little") for scale in scales)
    assert len(word) == 2 * 64 // block
    if bits == 3:
        return word + _plane(codes % 4, 2) + _plane(codes // 4, 1)
    return word + _plane(codes, bits)


def _plane(codes: Codes, bits: int) -> bytes:
    """Codes of so many bits: each byte has those of elements that are `8 * bits` apart."""
    return bytes(
        sum(int(codes[k]) << (k // (8 * bits) * bits) for k in range(j, 64, 8 * bits)) for j in range(8 * bits)
    )

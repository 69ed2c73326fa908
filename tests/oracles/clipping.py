"""Clipping by `clip_value` and `clip_norm`, from docs/protocol.md, in NumPy: one rank, one step after another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
CHUNK = 2**20


class Clipping:
    """The limits and shares of one rank."""

    def __init__(self, sizes: Sequence[int], norm: float | None, value: float | None) -> None:
        self.norm, self.value = norm, value
        self.sizes = [size / sum(sizes) for size in sizes]
        self.shares = list(self.sizes)

    def step(self, gradients: Sequence[Floats | None], scale: float = 1.0) -> list[Floats | None]:
        """The gradients of all parameters, multiplied by `scale` and clipped."""
        clipped: list[Floats | None] = []
        squares = []
        limits = self.limits()
        for p, g in enumerate(gradients):
            if g is None:
                clipped.append(None)
                squares.append(0.0)
                continue
            factor = scale
            if self.value is not None:
                g = np.clip(g * np.float32(scale), -np.float32(self.value), np.float32(self.value))
                factor = 1.0
            if self.norm is not None:
                square = square_sum(g)
                squares.append(square * factor**2)
                length = math.sqrt(square) * factor
                if length > limits[p]:
                    factor = factor * (limits[p] / length)
            clipped.append(g * np.float32(factor))
        if self.norm is not None and halves(squares) > 0:
            total = halves(squares)
            self.shares = [0.9 * q + (1 - 0.9) * (s / total) for q, s in zip(self.shares, squares, strict=True)]
        return clipped

    def limits(self) -> list[float]:
        if self.norm is None:
            return []
        total = halves(self.shares)
        return [self.norm * math.sqrt((q / total + size) / 2) for q, size in zip(self.shares, self.sizes, strict=True)]


def halves(values: Sequence[float]) -> float:
    """A sum: zeros up to a power of two, then the second half is added to the first until one is left."""
    sums = [*values, *[0.0] * ((1 << (len(values) - 1).bit_length()) - len(values))]
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
    return sums[0]


def square_sum(values: Floats) -> float:
    """Of chunks: float32 squares in halves within a word; words in double, 32 at a time in halves; those in order."""
    total = 0.0
    for first in range(0, values.size, CHUNK):
        squares = values.reshape(-1)[first : first + CHUNK] ** 2
        words = np.pad(squares, (0, -squares.size % 64)).reshape(-1, 64)
        while words.shape[1] > 1:
            words = words[:, : words.shape[1] // 2] + words[:, words.shape[1] // 2 :]
        blocks = np.pad(words[:, 0].astype(np.float64), (0, -len(words) % 32)).reshape(-1, 32)
        while blocks.shape[1] > 1:
            blocks = blocks[:, : blocks.shape[1] // 2] + blocks[:, blocks.shape[1] // 2 :]
        chunk = 0.0
        for block in blocks[:, 0]:
            chunk += float(block)
        total += chunk
    return total

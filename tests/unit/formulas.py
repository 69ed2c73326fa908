"""What a kernel should give, from plain formulas in double precision: where a case's elements stand, and how close is
close enough."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
FLOAT32 = 1e-6
"""A few roundings of float32."""
BFLOAT16 = 2.0**-8
"""One rounding of bfloat16."""


def double(tensor: Tensor) -> Array:
    return tensor.double().numpy().copy()


class Places:
    """Where the elements of a run table stand, all runs after one another."""

    def __init__(self, runs: Tensor) -> None:
        self.runs: list[list[int]] = runs.tolist()
        self.element = np.concatenate([np.arange(run[0], run[0] + run[2]) for run in self.runs])
        self.in_param = np.concatenate([np.arange(run[1], run[1] + run[2]) for run in self.runs])
        self.shard = np.concatenate([np.full(run[2], run[5]) for run in self.runs])

    def signs(self, flat_words: Tensor) -> Array:
        """+1 and -1 for the bits of the flat space."""
        return 2.0 * np.unpackbits(flat_words.numpy().view(np.uint8), bitorder="little")[self.element] - 1.0

    def bits(self, packet: Tensor) -> Array:
        """The bits of a packet; those of the padding must be 0."""
        found: list[Array] = []
        for _, _, count, byte, _, _ in self.runs:
            words = packet.numpy()[byte : byte + 8 * -(-count // 64)]
            unpacked = np.unpackbits(words, bitorder="little")
            assert not unpacked[count:].any()
            found.append(unpacked[:count] == 1)
        return np.concatenate(found)

    def floats(self, packet: Tensor) -> Array:
        """The floats of a packet."""
        found = [packet.numpy()[run[3] : run[3] + 4 * run[2]].copy().view(np.float32) for run in self.runs]
        return np.concatenate(found).astype(np.float64)

    def by_run(self, values: Array) -> list[Array]:
        """Values of all elements, cut into runs."""
        return np.split(values, np.cumsum([run[2] for run in self.runs])[:-1])


def sign_of(values: Array) -> Array:
    return np.where(values >= 0, 1.0, -1.0)


def assert_sum(actual: Array, *terms: Array, stored: float = 0.0) -> None:
    """`actual` is the sum of the terms but for roundings, of the terms in float32 and of what was `stored`."""
    expected, size = np.zeros_like(actual), np.full_like(actual, 1e-30)  # what is less may vanish
    for term in terms:
        expected, size = expected + term, size + np.abs(term)
    differ = expected != actual
    assert np.isfinite(expected[differ]).all(), "infinities are equal or wrong"
    error = np.abs(actual[differ] - expected[differ])
    wrong = error > FLOAT32 * size[differ] + stored * np.abs(expected[differ])
    assert not wrong.any(), (np.flatnonzero(differ)[wrong][:4], actual[differ][wrong][:4], expected[differ][wrong][:4])


def assert_sums(actual: Tensor, *by_run: list[Array]) -> None:
    """Column `i` of `actual` has the sums of the runs of `by_run[i]`."""
    for column, runs in zip(actual.view(actual.shape[0], -1).numpy().T, by_run, strict=True):
        np.testing.assert_allclose(column, [run.sum() for run in runs], rtol=1e-5)

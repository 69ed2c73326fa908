"""SketchedAMSGrad for n workers in one process: a count sketch of all momenta tells which k of them to exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.oracles.birder import key
from tests.oracles.flat_space import (
    TOO_LARGE,
    Betas,
    FlatSpace,
    Gradient,
    Gradients,
    Group,
    Outcome,
    by_parameter,
    join,
)

PRIME = 2**31 - 1
COEFFICIENTS = 4
ROW_KEYS = 2
"""The number that sets these keys apart from those of other random numbers."""


# The count sketch ----------------------------------------------------------------------------------------------------


def hashes(seed: int, row: int, elements: np.ndarray) -> np.ndarray:
    """h = a0 + a1 e + a2 e^2 + a3 e^3 mod 2^31 - 1"""
    h = np.zeros(elements.shape, dtype=np.int64)
    for i in reversed(range(COEFFICIENTS)):
        # Both factors are less than 2^31, so that 63 bits are enough.
        h = (h * elements + key(seed, ROW_KEYS, row, i) % PRIME) % PRIME
    return h


class CountSketch:
    """In which column of each row `elements` of the flat space are counted, and with which sign."""

    def __init__(self, rows: int, columns: int, seed: int, elements: np.ndarray) -> None:
        self.shape = (rows, columns)
        h = np.stack([hashes(seed, row, elements) for row in range(rows)])
        self.signs = np.where(h % 2 == 0, 1.0, -1.0)
        self.columns = ((h >> 1) * columns) >> 30

    def table(self, values: np.ndarray) -> np.ndarray:
        rows, columns = self.shape
        return np.stack(
            [np.bincount(self.columns[j], weights=self.signs[j] * values, minlength=columns) for j in range(rows)]
        )

    def estimate(self, table: np.ndarray) -> np.ndarray:
        """The median over rows."""
        return np.median(self.signs * np.take_along_axis(table, self.columns, axis=1), axis=0)


# The optimizer -------------------------------------------------------------------------------------------------------


@dataclass
class SketchedParameter:
    """A parameter with what all workers keep for it alike. `last_lr` is the last that was not 0, None before one."""

    value: np.ndarray
    group: Group
    elements: np.ndarray
    betas: Betas
    eps: float
    v: np.ndarray = field(init=False)
    peak: np.ndarray = field(init=False)
    last_lr: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.v = np.full(self.elements.size, self.eps)
        self.peak = self.v

    def take_ratio(self) -> float:
        """lr_before / lr, in whose units errors are carried over; to be asked once a step."""
        now, before = self.group.lr, self.last_lr
        if now == 0:
            return 1.0
        self.last_lr = now
        return 1.0 if before is None else before / now

    def move(self, picked: np.ndarray, p: np.ndarray, g: np.ndarray) -> None:
        """What has moved before decays; what is picked moves."""
        lr, beta2 = self.group.lr, self.betas[1]
        x = self.value.reshape(-1)
        x = np.where(self.v != self.eps, (1 - lr * self.group.weight_decay) * x, x)
        picked = picked & ((p != 0) | (g != 0))
        self.v = np.where(picked, beta2 * self.v + (1 - beta2) * g**2, self.v)
        self.peak = np.maximum(self.peak, self.v)
        self.value = np.where(picked, x - lr * p / np.sqrt(self.peak), x).reshape(self.value.shape)


class SketchedAMSGradOracle:
    """As OneBitAdamOracle; there are no shards, so `slices` and `bucket_elements` make no difference.

    `compressed=False` picks all there is. What follows is joined, `m`, `p` and `e` with a row for
    each worker: `p` is what each wanted to say in the last step, `e` what it has not said, and `picked` where it has.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        workers: int,
        *,
        slices: int = 1,
        bucket_elements: int,
        compressed: bool = True,
        rows: int = 5,
        columns: int,
        k: int,
        seed: int = 0,
        betas: Betas = (0.9, 0.99),
        eps: float = 1e-8,
        maximize: bool = False,
    ) -> None:
        self.groups = list(groups)
        self.compressed, self.maximize = compressed, maximize
        self.k = k
        self.space = FlatSpace(self.groups, workers, slices, bucket_elements)
        # States are float32 and begin at eps, and whether they still are there decides what decays.
        eps = float(np.float32(eps))
        self.parameters = [SketchedParameter(*place, place.group.betas or betas, eps) for place in self.space.places]
        self.sketch = CountSketch(rows, columns, seed, self.space.elements)
        elements = self.space.elements.size
        self.m, self.p, self.e = (np.zeros((workers, elements)) for _ in range(3))
        self.picked = np.zeros(elements, dtype=bool)
        self.step_number = 0

    @property
    def values(self) -> list[np.ndarray]:
        return [p.value for p in self.parameters]

    def step(self, gradients: Gradients) -> Outcome:
        self.step_number += 1
        of_parameters = by_parameter(gradients, [p.elements.size for p in self.parameters], self.maximize)
        g, skipped = self._absorb(of_parameters)
        self.picked = np.zeros_like(self.picked)
        if not skipped:
            moving = [
                gradient.anywhere and p.group.lr > 0 for p, gradient in zip(self.parameters, of_parameters, strict=True)
            ]
            self.picked = self._pick(moving)
            of_each = (self.space.split(joined) for joined in (self.picked, self.p.mean(axis=0), g.mean(axis=0)))
            for p, gradient, *answer in zip(self.parameters, of_parameters, *of_each, strict=True):
                if gradient.anywhere:
                    p.move(*answer)
        self.e = np.where(self.picked, 0.0, self.p)
        return Outcome("sketch" if self.compressed else "dense", [skipped] * self.space.workers)

    def _absorb(self, gradients: Sequence[Gradient]) -> tuple[np.ndarray, bool]:
        """m and p of all workers; returns gradients, as 0 where they made no fit numbers, and whether that was so."""
        g = join([of_parameter.of_workers for of_parameter in gradients])
        beta1 = self.space.spread([p.betas[0] for p in self.parameters])
        m = beta1 * self.m + (1 - beta1) * g
        p = m + self.space.spread([p.take_ratio() for p in self.parameters]) * self.e
        fit = (np.abs(m) < TOO_LARGE) & (np.abs(p) < TOO_LARGE)
        self.m, self.p = np.where(fit, m, self.m), np.where(fit, p, self.e)
        return np.where(fit, g, 0.0), not fit.all()

    def _pick(self, moving: Sequence[bool]) -> np.ndarray:
        """The k largest of |U|/sqrt(peak) among the parameters that may move; the first of equals."""
        if not self.compressed:
            return self.space.spread(moving)
        candidates = np.flatnonzero(self.space.spread(moving))
        tables = [self.sketch.table(of_worker) for of_worker in self.p]
        keys = np.abs(self.sketch.estimate(np.mean(tables, axis=0))) / np.sqrt(join([p.peak for p in self.parameters]))
        best_first = np.lexsort((self.space.elements[candidates], -keys[candidates]))
        picked = np.zeros_like(self.picked)
        picked[candidates[best_first[: self.k]]] = True
        return picked

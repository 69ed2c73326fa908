"""Distributed Lion for n workers in one process, as plainly as it can be written.

It knows the paper and docs/protocol.md, and imports nothing of thinwire. State is float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.oracles.birder import worker_uniform
from tests.oracles.flat_space import WORD, Gradients, Group, lay_out

REFRESH_PERIOD = 256
EPS = 1e-12


@dataclass
class Parameter:
    """A parameter where it lies in the flat space, and the state of every worker for it (first axis: worker)."""

    value: np.ndarray
    group: Group
    elements: np.ndarray
    m: np.ndarray
    update: np.ndarray
    active: np.ndarray


class DistributedLionOracle:
    """`groups` hold the starting values; `step` takes gradients as ``[worker][parameter]``, None where absent."""

    def __init__(
        self,
        groups: Sequence[Group],
        workers: int,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        maximize: bool = False,
        downlink: str = "majority",
        compressed: bool = True,
    ) -> None:
        self.workers = workers
        self.beta1, self.beta2 = betas
        self.maximize, self.downlink, self.compressed = maximize, downlink, compressed
        self.step_number = 0
        self.parameters = []
        for place in lay_out(list(groups)):
            state = (workers, place.value.size)
            active = np.zeros(place.value.size, dtype=bool)
            self.parameters.append(Parameter(*place, m=np.zeros(state), update=np.zeros(state), active=active))

    def step(self, gradients: Gradients) -> bool:
        """Take a step; whether it was taken and not skipped."""
        self.step_number += 1
        nonfinite = False
        for worker, of_worker in enumerate(gradients):
            for p, gradient in zip(self.parameters, of_worker, strict=True):
                if gradient is not None:
                    nonfinite |= self._absorb(p, worker, gradient.reshape(-1).astype(np.float64))
        if self.step_number == 1 and self.compressed:
            for p in self.parameters:
                p.active |= has_update(p)
        if nonfinite:
            return False
        for index, p in enumerate(self.parameters):
            present = any(of_worker[index] is not None for of_worker in gradients)
            moves = p.active if self.compressed else has_update(p)
            self._apply(p, moves & present)
            if self.compressed:
                refreshed = (p.elements // WORD) % REFRESH_PERIOD == self.step_number % REFRESH_PERIOD
                p.active = np.where(refreshed, has_update(p), p.active | has_update(p))
        return True

    def _absorb(self, p: Parameter, worker: int, g: np.ndarray) -> bool:
        g = -g if self.maximize else g
        finite = np.isfinite(g)
        g = np.where(finite, g, 0.0)
        m = p.m[worker].copy()
        p.update[worker] = np.where(finite, self.beta1 * m + (1 - self.beta1) * g, p.update[worker])
        p.m[worker] = np.where(finite, self.beta2 * m + (1 - self.beta2) * g, m)
        return not finite.all()

    def _apply(self, p: Parameter, moves: np.ndarray) -> None:
        deltas = np.empty(p.update.shape)
        for worker, update in enumerate(p.update.astype(np.float32)):
            # The sign of the update if it is larger than EPS, and a random bit if nothing is left of it.
            r = worker_uniform(0, self.step_number, worker, p.elements)
            deltas[worker] = np.where(update > r * ((update + np.float32(EPS)) * np.float32(0.5)), 1, -1)
        if self.downlink == "votes" or not self.compressed:
            direction = deltas.mean(axis=0)
        else:
            tie = deltas[self.step_number % self.workers]
            direction = np.where(deltas.sum(axis=0) == 0, tie, np.sign(deltas.sum(axis=0)))
        x = p.value.reshape(-1)
        moved = (1 - p.group.lr * p.group.weight_decay) * x - p.group.lr * direction
        p.value = np.where(moves, moved, x).reshape(p.value.shape)


def has_update(p: Parameter) -> np.ndarray:
    """Whether any worker has an update for a coordinate."""
    return np.any(np.abs(p.update) > EPS, axis=0)

"""Local steps with outer updates (DiLoCo and Streaming DiLoCo), literally: n workers in one process, in NumPy.

    Δ = θ_ref - θ,  Δ̄ = average(Δ),  m ← μ·m + Δ̄,  θ_ref ← θ_ref - η·(Δ̄ + μ·m),  θ ← α·θ + (1 - α)·θ_ref

What an inner optimizer does is given: how far each worker moves each parameter. So is the average: a function from the
updates of all workers to one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Arrays = list[np.ndarray]
Average = Callable[[list[Arrays]], Arrays]


def mean(updates: list[Arrays]) -> Arrays:
    """The mean in float32, in the order of the workers."""
    averaged = []
    for of_workers in zip(*updates, strict=True):
        total = of_workers[0]
        for other in of_workers[1:]:
            total = total + other
        averaged.append(total * np.float32(np.float32(1) / np.float32(len(of_workers))))
    return averaged


class LocalSteps:
    """`fragments` has for each fragment the indices of its parameters, and the function that averages them.

    `work` has for each worker how much it does in a step, for an average that is weighted by it. With
    `clip_to_median`, no ‖Δ‖ is above the median of those that are not zero.
    """

    def __init__(
        self,
        params: Sequence[np.ndarray],
        workers: int,
        fragments: Sequence[tuple[Sequence[int], Average]],
        *,
        every: Callable[[int], int],
        outer_lr: float,
        outer_momentum: float,
        delay: int = 0,
        mix: float = 0.0,
        work: Sequence[int] | None = None,
        clip_to_median: bool = False,
    ) -> None:
        self.theta = [[p.copy() for p in params] for _ in range(workers)]
        self.reference = [p.copy() for p in params]
        self.momentum = [np.zeros_like(p) for p in params]
        self.fragments, self.every = fragments, every
        self.eta, self.mu, self.alpha = np.float32(outer_lr), np.float32(outer_momentum), np.float32(mix)
        self.rest = np.float32(1.0 - mix)
        self.delay, self.clip_to_median = delay, clip_to_median
        self.weights = [workers * own / sum(work) for own in work] if work is not None else None
        self.step_number = self.interval = self.begun = 0
        self.pending: list[tuple[int, int, Arrays]] = []
        """The step after which an average is applied, its fragment, and the average."""

    def step(self, moves: Sequence[Sequence[np.ndarray]]) -> None:
        """One inner step of all workers, each of which moves its parameters down by `moves`."""
        for theta, of_worker in zip(self.theta, moves, strict=True):
            for index, move in enumerate(of_worker):
                theta[index] = theta[index] - move
        self.step_number += 1
        self.apply_due()
        done, length = self.step_number - self.begun, self.every(self.interval)
        for number in range(len(self.fragments)):
            if done == (number + 1) * length // len(self.fragments):
                self.send(number, self.step_number + self.delay)
        self.apply_due()
        if done == length:
            self.interval, self.begun = self.interval + 1, self.step_number

    def send(self, number: int, due: int) -> None:
        indices, average = self.fragments[number]
        updates = [[self.reference[i] - theta[i] for i in indices] for theta in self.theta]
        if self.clip_to_median:
            norms = [np.sqrt(sum(float(np.sum(u.astype(np.float64) ** 2)) for u in own)) for own in updates]
            median = np.median([norm for norm in norms if norm > 0])
            factors = [np.float32(min(1.0, median / norm)) if norm > 0 else np.float32(1.0) for norm in norms]
            updates = [[f * u for u in own] for f, own in zip(factors, updates, strict=True)]
        if self.weights is not None:
            updates = [[np.float32(w) * u for u in own] for w, own in zip(self.weights, updates, strict=True)]
        self.pending.append((due, number, average(updates)))

    def apply_due(self) -> None:
        due = [each for each in self.pending if each[0] == self.step_number]
        self.pending = [each for each in self.pending if each[0] != self.step_number]
        for _, number, averaged in due:
            for i, update in zip(self.fragments[number][0], averaged, strict=True):
                self.momentum[i] = self.mu * self.momentum[i] + update
                self.reference[i] = self.reference[i] - self.eta * (self.mu * self.momentum[i] + update)
                for theta in self.theta:
                    mixed = self.alpha * theta[i] + self.rest * self.reference[i]
                    theta[i] = mixed if self.alpha else self.reference[i].copy()

"""The schedules of 0/1 Adam: when it updates its variance, when workers synchronize, and the sums since then."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from thinwire.transport.memory import HOST


def variance_steps(scaler: int, last: int) -> frozenset[int]:
    """The steps up to `last` that update the variance: `scaler` in a row, as many two steps apart, and so on."""
    return frozenset(itertools.takewhile(lambda step: step <= last, _variance_steps(scaler)))


def _variance_steps(scaler: int) -> Iterator[int]:
    step, apart = 0, 1
    while True:
        for _ in range(scaler):
            step += apart
            yield step
        apart *= 2


def local_interval(since_freeze: int, scaler: int, clipper: int) -> int:
    """The interval between synchronizations at a step, counted from 1 after the freeze."""
    doublings = (since_freeze - 1) // scaler
    # No clipper is larger than 2**62; the limit keeps the power small.
    return min(2 ** min(doublings, 62), clipper)


class Interval:
    """Sums over the steps since replicas were equal, in one small tensor that is saved with the state.

    Args:
        groups: the number of parameter groups.
    """

    def __init__(self, groups: int) -> None:
        # The last step before the variance was frozen (0: not yet), and the number of local steps since replicas were
        # equal. Then, for each group: the sum of learning rates since then; 1 minus the product of weight-decay factors
        # since then (so that everything starts at zero); the sum of learning rates of the previous interval.
        self.memory = torch.zeros(2 + 3 * groups, dtype=torch.float64, device=HOST)
        self._sums, self._losses, self._sums_before = self.memory[2:].view(3, groups)
        self.read()

    def read(self) -> None:
        """Update the attributes from the tensor, which may have been loaded."""
        self.frozen_at = int(self.memory[0])
        """The last step before the variance was frozen; 0 if it is not."""
        self.local_steps = int(self.memory[1])
        """The number of local steps since replicas were equal."""

    def freeze(self, step: int) -> None:
        """Record that the variance is frozen with this step."""
        self.memory[0] = self.frozen_at = step

    def add_step(self, rates: Sequence[float], decays: Sequence[float], *, local: bool) -> None:
        """Add a step, given the learning rate and the weight-decay factor of each group."""
        self.local_steps += local
        self.memory[1] = self.local_steps
        self._sums += torch.tensor(rates, dtype=torch.float64, device=HOST)
        self._losses.copy_(1.0 - (1.0 - self._losses) * torch.tensor(decays, dtype=torch.float64, device=HOST))

    def totals(self) -> tuple[list[float], list[float]]:
        """For each group, the sum of learning rates, and the product of weight-decay factors."""
        return self._sums.tolist(), (1.0 - self._losses).tolist()

    def shrinks(self, rates: Sequence[float], length: int) -> list[float]:
        """For each group, the ratio of the expected sum of learning rates to that of the last interval; at most 1.

        Args:
            rates: the learning rates in the first step of an interval.
            length: the number of steps of the interval.
        """
        if bool(self._sums.any()):
            return [1.0] * len(rates)  # the interval has already begun
        pairs = zip(rates, self._sums_before.tolist(), strict=True)
        return [min(1.0, rate * length / before) if before > 0 else 1.0 for rate, before in pairs]

    def end(self) -> None:
        """End the interval: replicas are equal again."""
        torch.where(self._sums > 0, self._sums, self._sums_before, out=self._sums_before)
        self.memory[1] = self.local_steps = 0
        self._sums.zero_()
        self._losses.zero_()

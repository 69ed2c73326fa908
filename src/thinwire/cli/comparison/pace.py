"""How long a run of the demo lasts, how far it is, and what a step would take on another network."""

from __future__ import annotations

import operator
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """What a run may use: seconds of training, or steps. One of the two is None."""

    seconds: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.steps is None):
            raise ValueError(f"a budget has either seconds or steps, got {self.seconds} and {self.steps}")

    def planned_steps(self, step_seconds: float) -> int:
        """The steps of a run whose steps take so long: its learning rates and stages are laid out for them."""
        if self.seconds is None:
            assert self.steps is not None
            return self.steps
        return max(1, round(self.seconds / step_seconds))

    def position(self, planned_steps: int, taken: int, elapsed: float) -> float:
        """How far a run is, in steps of its plan.

        In a budget of seconds the clock decides, not the steps: the learning rate then falls to its end exactly when
        the time is up, even if the machine is not as fast as it was when the plan was made.
        """
        if self.seconds is None:
            return taken
        return min(1.0, elapsed / self.seconds) * planned_steps

    def is_spent(self, taken: int, elapsed: float) -> bool:
        """Whether no further step fits, or only the smaller part of one."""
        if self.seconds is None:
            return taken == self.steps
        return elapsed + elapsed / taken / 2 >= self.seconds


@dataclass(frozen=True)
class PredictedClock:
    """The time that steps would take if every worker had a link of its own with this rate.

    The exchange hides behind forward and backward, unless it only begins when they are over. Latency and the work of
    sending are left out.
    """

    bits_per_second: float
    compute: float
    """Seconds of forward and backward while nobody sends."""
    optimizer: float
    """Seconds of `optimizer.step()` without its waiting."""
    overlaps: bool

    def step_seconds(self, bytes_sent: float) -> float:
        """Of a step in which each worker sends so many bytes."""
        together = max if self.overlaps else operator.add
        return together(self.compute, 8 * bytes_sent / self.bits_per_second) + self.optimizer

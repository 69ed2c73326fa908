"""When the dense warm-up of an optimizer ends: after so many steps, or when the variance has settled.

Everything that the decision needs is in one small tensor, which is saved with the optimizer's state; as it is computed
from values that are the same on all ranks, so is the decision.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from typing import Literal

import torch

from thinwire._checks import INT64_MAX, is_integer
from thinwire.transport.memory import HOST

_LOG = logging.getLogger("thinwire")

Length = int | Literal["auto"]
"""So many steps, or as many as it takes."""

STABLE = 0.96
"""The variance has settled when it is at least this much of what it was one window ago."""
_CHECKS = 16
"""How often in a window one looks."""


def check(warmup_steps: Length, beta2: float) -> None:
    """Refuse lengths that make no sense.

    Raises:
        ValueError: naming the argument.
    """
    window = window_of(beta2)
    if warmup_steps != "auto":
        if not is_integer(warmup_steps, 1, INT64_MAX):
            raise ValueError(f"warmup_steps={warmup_steps!r}: expected 'auto' or a positive number of steps")
        if warmup_steps < window:
            raise ValueError(
                f"warmup_steps={warmup_steps}: the variance would be frozen before one window of it, 1/(1 - beta2) = "
                f"{window} steps, has passed. Expected at least {window}, or a smaller beta2 than {beta2}"
            )


def warn_of_dense_run(warmup_steps: Length, total_steps: int | None, beta2: float) -> None:
    """Warn the caller's caller's caller of a warm-up that leaves nothing to save.

    Raises:
        ValueError: for a length that is none.
    """
    if total_steps is None:
        return
    if not is_integer(total_steps, 1, INT64_MAX):
        raise ValueError(f"total_steps={total_steps!r}: expected a positive number of steps, or None")
    least = (_CHECKS + 1) * _steps_between_checks(beta2) if warmup_steps == "auto" else warmup_steps
    if least >= total_steps:
        warnings.warn(
            f"warmup_steps={warmup_steps!r} with total_steps={total_steps}: the warm-up takes at least {least} steps, "
            "so that the whole run is going to be dense and sends as much as DDP does. A smaller beta2 settles "
            "sooner, or use thinwire.Birder, which needs no warm-up",
            RuntimeWarning,
            stacklevel=4,
        )


def window_of(beta2: float) -> int:
    """How many steps the variance looks back."""
    return max(1, round(1.0 / (1.0 - beta2)))


def _steps_between_checks(beta2: float) -> int:
    return math.ceil(window_of(beta2) / _CHECKS)


class Warmup:
    """Decides at the end of every step whether it was the last one of the warm-up.

    Args:
        length: of the warm-up in steps, or "auto".
        beta2: of the variance, the largest of all groups.
        groups: how many parameter groups there are.
    """

    def __init__(self, length: Length, beta2: float, groups: int) -> None:
        self._length = length
        self._beta2 = beta2
        self._window = window_of(beta2)
        self._every = _steps_between_checks(beta2)
        # The step at which it ended (0: not yet) and the last at which a learning rate rose, the variance at the last
        # checks, and the last learning rates.
        self.memory = torch.zeros(2 + _CHECKS + groups, dtype=torch.float64, device=HOST)
        self._sums = self.memory[2 : 2 + _CHECKS]
        self._rates = self.memory[2 + _CHECKS :]

    @property
    def ended_at(self) -> int:
        """The last step of the warm-up; 0 while it lasts."""
        return int(self.memory[0])

    def over(self, step: int, variance: float, rates: Sequence[float]) -> bool:
        """Whether the warm-up ends with this step.

        Args:
            step: its number.
            variance: the sum of all variances after it.
            rates: the learning rates of the groups in this step.
        """
        now = torch.tensor(rates, dtype=torch.float64, device=HOST)
        if step > 1 and bool((now > self._rates).any()):
            self.memory[1] = step
        self._rates.copy_(now)
        # Schedules may rise once an epoch only: they have stopped when a window has seen no rise.
        rises = int(self.memory[1]) > 0 and step - int(self.memory[1]) < self._window
        settled = self._settled(step, variance) and not rises
        ends = step >= self._length if isinstance(self._length, int) else settled
        if ends:
            self.memory[0] = step
            _LOG.info("the warm-up has ended with step %d: from now on signs are exchanged", step)
        return ends

    def _settled(self, step: int, variance: float) -> bool:
        if step % self._every:
            return False
        look = step // self._every
        before = float(self._sums[look % _CHECKS])  # written one window ago
        # Without its bias, which alone would let the variance grow in the first windows, whatever the gradients do.
        now = variance / (1.0 - self._beta2**step)
        self._sums[look % _CHECKS] = now
        return look > _CHECKS and before > 0 and now >= STABLE * before

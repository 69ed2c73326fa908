"""Birder with one step of delay: exchanges are as before, and each answer moves the parameters one step later.

    x_{t+1} = (1 - lr_t wd) x_t - lr_t answer_{t-1}

The rate and the decay are those of the step that moves. A skipped step has no answer, so the step after it moves
nothing, and neither does the first.
"""

from __future__ import annotations

import numpy as np

from tests.oracles.birder import BirderOracle, Outcome, Parameter
from tests.oracles.flat_space import Gradients


class DelayedBirderOracle(BirderOracle):
    """As `BirderOracle`, for compressed exchanges."""

    _answers: tuple[tuple[Parameter, np.ndarray, np.ndarray], ...] = ()
    """Of the last exchange: a parameter, the votes, and what moves."""

    def step(self, gradients: Gradients) -> Outcome:
        before, self._answers = self._answers, ()
        outcome = super().step(gradients)
        for p, votes, moving in before:
            super()._apply(p, votes, moving)
        return outcome

    def _apply(self, p: Parameter, votes: np.ndarray, moving: np.ndarray) -> None:
        self._answers += ((p, votes, moving.copy()),)

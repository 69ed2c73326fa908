"""When things happen in a run: how the learning rate goes up and down, and after which steps something is due."""

from __future__ import annotations

import math


def learning_rate_factor(step: float, steps: int, last: float = 0.0) -> float:
    """Linear warm-up over a tenth of a run, then half a cosine down to `last`.

    A run of so many seconds is between two steps of its plan, so `step` may be any number.
    """
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return min(1.0, (step + 1) / warm_up)
    fall = 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))
    return last + (1 - last) * fall


def is_due(step: float, steps: int, times: int, before: float | None = None) -> bool:
    """Whether this step is one of ``times`` that are spread evenly over all; the last one always is.

    ``before`` is where the run was one step earlier, if that is not ``step - 1``.
    """
    earlier = step - 1 if before is None else before
    return step * times // steps > earlier * times // steps

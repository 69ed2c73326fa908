"""When things happen in a run: how the learning rate goes up and down, and after which steps something is due."""

from __future__ import annotations

import math


def learning_rate_factor(step: int, steps: int, last: float = 0.0) -> float:
    """Linear warm-up over a tenth of a run, then half a cosine down to `last`."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    fall = 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))
    return last + (1 - last) * fall


def is_due(step: int, steps: int, times: int) -> bool:
    """Whether this step is one of ``times`` that are spread evenly over all; the last one always is."""
    return step * times // steps > (step - 1) * times // steps

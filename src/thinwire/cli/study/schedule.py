"""How learning rates go up and down in the study."""

from __future__ import annotations

import math

WARM_UP_SHARE = 0.1
LAST_FACTOR = 0.1


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over a tenth of a run, then half a cosine down to a tenth of the rate."""
    warm_up = max(1, round(WARM_UP_SHARE * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    fall = 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))
    return LAST_FACTOR + (1 - LAST_FACTOR) * fall

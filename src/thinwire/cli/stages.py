"""Settings with which optimizers whose steps are not all alike are soon where a benchmark wants them.

All of them are dense for two steps, in which a benchmark warms up anyway. Frozen so early the variance says nothing: at
an ordinary learning rate some coordinates would fly off, and a run that is not finite is no run to measure. At this one
nothing moves far, and every step does the same work.
"""

from __future__ import annotations

from typing import Any

DENSE_STEPS = 2
LOCAL_CYCLE = 16
"""The longest interval between synchronisations of 0/1 Adam, by default."""

# Betas so small that bias correction is over with the dense steps: while it falls, 0/1 Adam lets its errors follow.
_STILL = {"lr": 1e-8, "betas": (0.1, 0.5)}

WARMED_UP: dict[str, Any] = {**_STILL, "warmup_steps": DENSE_STEPS}
"""1-bit Adam and 1-bit LAMB: compressed from the third step on."""

SYNCHRONISING: dict[str, Any] = {
    **_STILL,
    "var_freeze_step": DENSE_STEPS,
    "var_update_scaler": DENSE_STEPS,
    "local_step_scaler": 10**9,
}
"""0/1 Adam: a synchronisation at every step from the third on."""

MOSTLY_LOCAL: dict[str, Any] = {**SYNCHRONISING, "local_step_scaler": 1, "local_step_clipper": LOCAL_CYCLE}
"""0/1 Adam: from the fifth step on `LOCAL_CYCLE` steps in a row are local but for one, wherever one begins to count."""

OF_ALL_KINDS: dict[str, Any] = {**MOSTLY_LOCAL, "var_freeze_step": 4, "local_step_clipper": 2}
"""0/1 Adam: dense and signs up to the fourth step, local steps and synchronisations up to the eighth."""

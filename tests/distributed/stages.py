"""The optimizers of scaled signs with schedules so short that a few steps see every stage."""

from __future__ import annotations

from typing import Any

import torch

import thinwire

FREEZE = 10
"""The last step before the variance is frozen."""
WARM_UP = {"betas": (0.9, 0.9), "warmup_steps": FREEZE}
VARIANCE = {
    "betas": (0.9, 0.9),
    "var_freeze_step": FREEZE,
    "var_update_scaler": 4,
    "local_step_scaler": 3,
    "local_step_clipper": 4,
}
VARIANCE_STEPS = (1, 2, 3, 4, 6, 8, 10)
LOCAL_STEPS = (15, 17, 19, 20, 21, 23, 24, 25, 27, 28, 29)
"""The first of them; ZeroOneAdam's steps 5, 7, 9 and those after FREEZE that are not listed exchange signs."""
PAPER: dict[str, Any] = {"warmup_bits": None, "scale_block": None}
"""1-bit Adam as in the paper: a dense warm-up, and one scale per shard."""
STAGES: dict[str, tuple[type, dict[str, Any]]] = {
    "OneBitAdam": (thinwire.OneBitAdam, {**WARM_UP, **PAPER}),
    "ZeroOneAdam": (thinwire.ZeroOneAdam, VARIANCE),
    "Lamb": (thinwire.Lamb, {"betas": (0.9, 0.9)}),
    "OneBitLamb": (thinwire.OneBitLamb, WARM_UP),
}


def make(name: str, params: Any, **options: Any) -> Any:
    """The optimizer of that name, with its short schedule."""
    optimizer, schedule = STAGES[name]
    return optimizer(params, **{"lr": 0.01, **schedule, **options})


def noise(shape: tuple[int, ...], *seed: int) -> torch.Tensor:
    """The same for the same seed, on every rank."""
    number = 0
    for part in seed:
        number = 1000 * number + part
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def parameters(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    """The same values on every rank."""
    return [torch.nn.Parameter(noise(shape, 999, i)) for i, shape in enumerate(shapes)]


def flat(tensors: Any) -> torch.Tensor:
    """All values in one vector."""
    return torch.cat([tensor.detach().float().reshape(-1) for tensor in tensors])

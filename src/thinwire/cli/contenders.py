"""Who runs in the demo: DDP + AdamW, and the optimizers that can take its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import thinwire

WEIGHT_DECAY = 0.1
DENSE_SHARE = 0.15
"""Of a run: how much of it is dense, or mostly so, in optimizers that begin like that."""


@dataclass(frozen=True)
class Race:
    """What the settings of a contender may depend on."""

    steps: int
    seed: int
    downlink: str | None = None
    """Birder's."""


@dataclass(frozen=True)
class Contender:
    """An optimizer class with the settings that suit the demo's model."""

    label: str
    optimizer: Callable[..., torch.optim.Optimizer]
    settings: dict[str, Any]
    remark: str | None = None
    """Which steps send what, for those whose steps are not all alike."""
    overlaps: bool = True
    """Whether it sends while backward runs."""

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer for these parameters."""
        return self.optimizer(parameters, **self.settings)


# Betas are those of `thinwire study`; docs/convergence.md tells. The rates of AdamW and Birder did best of a few in one
# run each of the demo's model; the others' are of the study's, which is smaller.


def adamw() -> Contender:
    """What everybody uses today."""
    settings = {"lr": 5e-3, "betas": (0.7, 0.95), "weight_decay": WEIGHT_DECAY, "fused": True}
    return Contender("DDP + AdamW", torch.optim.AdamW, settings)


def dense_steps(steps: int) -> int:
    """How many steps of a run are dense, or mostly so, in optimizers that begin like that."""
    return max(1, round(DENSE_SHARE * steps))


def warm_up(steps: int, betas: tuple[float, float] = (0.8, 0.95)) -> dict[str, Any]:
    """A warm-up that suits a run, and betas whose variance looks back no further than that."""
    dense = dense_steps(steps)
    return {"betas": (betas[0], min(betas[1], 1 - 1 / dense)), "warmup_steps": dense}


def local_steps(steps: int) -> dict[str, Any]:
    """A run of 0/1 Adam: when its variance is frozen, and a third of what is left at each of the intervals 1, 2, 4."""
    freeze = dense_steps(steps)
    return {
        "var_freeze_step": freeze,
        "var_update_scaler": min(16, freeze),
        "local_step_scaler": max(1, -(-(steps - freeze) // 3)),
    }


def _birder(race: Race) -> Contender:
    downlink = race.downlink or "bit"
    lr = {"bit": 4e-3, "majority": 3e-3, "votes": 4e-3}[downlink]
    settings = {"lr": lr, "weight_decay": WEIGHT_DECAY, "downlink": downlink, "seed": race.seed}
    return Contender("DDP + Birder", thinwire.Birder, settings)


def _onebit_adam(race: Race) -> Contender:
    settings = {"lr": 2.5e-3, "weight_decay": WEIGHT_DECAY, **warm_up(race.steps)}
    return Contender("DDP + 1-bit Adam", thinwire.OneBitAdam, settings, _first_dense("AdamW", race.steps))


def _onebit_lamb(race: Race) -> Contender:
    settings = {"lr": 5e-3, "weight_decay": WEIGHT_DECAY, **warm_up(race.steps)}
    return Contender("DDP + 1-bit LAMB", thinwire.OneBitLamb, settings, _first_dense("LAMB", race.steps))


def _first_dense(rule: str, steps: int) -> str:
    dense = dense_steps(steps)
    return f"the first {dense} of {steps} steps are {rule}'s and send floats, the others a bit a parameter each way."


def _zero_one_adam(race: Race) -> Contender:
    freeze = dense_steps(race.steps)
    settings = {"lr": 2.5e-3, "betas": (0.8, 0.95), "weight_decay": WEIGHT_DECAY, **local_steps(race.steps)}
    remark = (
        f"of the first {freeze} of {race.steps} steps ever fewer send floats, the others a bit a parameter each way; "
        "of those that follow all, then every second, then every fourth sends bits, and the others nothing. Workers "
        "synchronise before every validation, which is in the bytes but not in the times."
    )
    return Contender("DDP + 0/1 Adam", thinwire.ZeroOneAdam, settings, remark)


def _lamb(_: Race) -> Contender:
    settings = {"lr": 5e-3, "betas": (0.8, 0.95), "weight_decay": WEIGHT_DECAY}
    return Contender("DDP + LAMB", thinwire.Lamb, settings, "all steps send floats, as AdamW's do.")


def _cd_adam(_: Race) -> Contender:
    return Contender("DDP + CD-Adam", thinwire.CDAdam, {"lr": 4e-3, "weight_decay": WEIGHT_DECAY})


def _cd_adam_momentum(_: Race) -> Contender:
    settings = {"lr": 1e-3, "weight_decay": WEIGHT_DECAY, "compress": "momentum"}
    return Contender("DDP + CD-Adam of momenta", thinwire.CDAdam, settings)


def _cd_adam_topk(_: Race) -> Contender:
    settings = {"lr": 5e-3, "weight_decay": WEIGHT_DECAY, "codec": "topk"}
    return Contender("DDP + CD-Adam with top-k", thinwire.CDAdam, settings)


def _sketched_amsgrad(race: Race) -> Contender:
    settings = {"lr": 1.6e-2, "betas": (0.0, 0.99), "weight_decay": WEIGHT_DECAY, "seed": race.seed}
    return Contender("DDP + SketchedAMSGrad", thinwire.SketchedAMSGrad, settings, overlaps=False)


# What `--optimizer` offers. A new optimizer is one line: its name, and its settings for a race.
CHALLENGERS: dict[str, Callable[[Race], Contender]] = {
    "birder": _birder,
    "onebit-adam": _onebit_adam,
    "zero-one-adam": _zero_one_adam,
    "onebit-lamb": _onebit_lamb,
    "lamb": _lamb,
    "cd-adam": _cd_adam,
    "cd-adam-momentum": _cd_adam_momentum,
    "cd-adam-topk": _cd_adam_topk,
    "sketched-amsgrad": _sketched_amsgrad,
}

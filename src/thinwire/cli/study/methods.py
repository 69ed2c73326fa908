"""Who takes part in the study, and which settings each of them may try."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import thinwire
from thinwire.cli.contenders import dense_steps, warm_up
from thinwire.cli.study.references import DistributedLion, MeanAdamW, MeanSGD


@dataclass(frozen=True)
class Setting:
    """What a search varies."""

    lr: float
    beta: float
    weight_decay: float


@dataclass(frozen=True)
class Course:
    """What else a method may depend on."""

    steps: int
    seed: int


Build = Callable[[Iterable[nn.Parameter], Setting, Course], torch.optim.Optimizer]


@dataclass(frozen=True)
class Method:
    """An optimizer with a place to begin the search at, for a task whose `lr` is 1.

    The budget is the same for all: five learning rates, two other betas, two other decays.
    """

    name: str
    title: str
    lr: float
    betas: tuple[float, float, float]
    """The one to begin with, and two others."""
    build: Build
    means: str = "β1"
    """Which of its settings `beta` is."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Settings that are not searched, for people to read, and for the store to notice when they change."""
    decays: tuple[float, float, float] = (0.1, 0.03, 0.3)
    overlaps: bool = True
    only: str | None = None
    """The task that it is for; None for all."""

    def definition(self) -> dict[str, Any]:
        """All that decides a run, but for what is searched."""
        return {"beta": self.means, **self.fixed}


def _adamw(params: Iterable[nn.Parameter], setting: Setting, _: Course) -> torch.optim.Optimizer:
    betas = (setting.beta, 0.99)
    return MeanAdamW(params, lr=setting.lr, betas=betas, weight_decay=setting.weight_decay, fused=True)


def _sgdm(params: Iterable[nn.Parameter], setting: Setting, _: Course) -> torch.optim.Optimizer:
    return MeanSGD(params, lr=setting.lr, momentum=setting.beta, weight_decay=setting.weight_decay)


def _lion(params: Iterable[nn.Parameter], setting: Setting, _: Course) -> torch.optim.Optimizer:
    return DistributedLion(params, setting.lr, (setting.beta, 0.99), setting.weight_decay)


def _birder(**options: Any) -> Build:
    def build(params: Iterable[nn.Parameter], setting: Setting, course: Course) -> torch.optim.Optimizer:
        return thinwire.Birder(
            params, setting.lr, setting.beta, weight_decay=setting.weight_decay, seed=course.seed, **options
        )

    return build


def _after_warm_up(optimizer: type[torch.optim.Optimizer]) -> Build:
    def build(params: Iterable[nn.Parameter], setting: Setting, course: Course) -> torch.optim.Optimizer:
        chosen = warm_up(course.steps, longest_memory=0.98)
        betas = (setting.beta, chosen["betas"][1])
        options: dict[str, Any] = {**chosen, "betas": betas, "lr": setting.lr, "weight_decay": setting.weight_decay}
        return optimizer(params, **options)

    return build


def _zero_one_adam(params: Iterable[nn.Parameter], setting: Setting, course: Course) -> torch.optim.Optimizer:
    freeze = dense_steps(course.steps)
    return thinwire.ZeroOneAdam(
        params,
        setting.lr,
        (setting.beta, 0.98),
        weight_decay=setting.weight_decay,
        var_freeze_step=freeze,
        var_update_scaler=min(16, freeze),
        local_step_scaler=max(1, -(-(course.steps - freeze) // 3)),
    )


def _compressed(optimizer: type[torch.optim.Optimizer], **options: Any) -> Build:
    def build(params: Iterable[nn.Parameter], setting: Setting, course: Course) -> torch.optim.Optimizer:
        betas = (setting.beta, 0.99)
        return optimizer(params, **{"lr": setting.lr, "betas": betas, "weight_decay": setting.weight_decay, **options})

    return build


_MOMENTA = (0.9, 0.8, 0.95)
_SHORT = (0.8, 0.7, 0.9)
_FROZEN = {"warmup": "15 %", "beta2": "0.98, or 1 - 1/warmup"}

METHODS = {
    method.name: method
    for method in (
        Method("adamw", "AdamW", 5e-3, _MOMENTA, _adamw, fixed={"beta2": 0.99}),
        Method("sgdm", "SGDM", 0.2, _MOMENTA, _sgdm, means="momentum", decays=(1e-3, 0.0, 5e-3), only="pictures"),
        Method("birder-bit", "Birder", 4e-3, _SHORT, _birder(), means="β", fixed={"downlink": "bit"}),
        Method(
            "birder-votes",
            "Birder, votes",
            6e-3,
            _SHORT,
            _birder(downlink="votes"),
            means="β",
            fixed={"downlink": "votes"},
        ),
        Method("onebit-adam", "1-bit Adam", 5e-3, _MOMENTA, _after_warm_up(thinwire.OneBitAdam), fixed=_FROZEN),
        Method("zero-one-adam", "0/1 Adam", 5e-3, _MOMENTA, _zero_one_adam, fixed={"freeze": "15 %", "interval": 4}),
        Method("onebit-lamb", "1-bit LAMB", 1e-2, _MOMENTA, _after_warm_up(thinwire.OneBitLamb), fixed=_FROZEN),
        Method("cd-adam", "CD-Adam", 2e-3, _MOMENTA, _compressed(thinwire.CDAdam), fixed={"beta2": 0.99}),
        Method(
            "sketched-amsgrad",
            "SketchedAMSGrad",
            1e-3,
            _MOMENTA,
            _compressed(thinwire.SketchedAMSGrad, eps=1e-4),
            fixed={"beta2": 0.99, "eps": 1e-4},
            overlaps=False,
        ),
        Method("lion", "Distributed Lion", 5e-4, _MOMENTA, _lion, fixed={"beta2": 0.99}),
    )
}

"""Who takes part in the study, and which settings each of them may try."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import thinwire
from thinwire.cli.contenders import local_steps, warm_up
from thinwire.cli.study.references import DistributedLion, MeanAdamW, MeanSGD
from thinwire.schemes.stochastic_sign import Downlink


@dataclass(frozen=True)
class Setting:
    """What a search varies."""

    lr: float
    betas: tuple[float, ...]
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

    The budget is the same for all: four learning rates, two other betas, another decay.
    """

    name: str
    title: str
    lr: float
    betas: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    """Those to begin with, and two others."""
    build: Build
    fixed: dict[str, Any] = field(default_factory=dict)
    """Settings that are not searched, for people to read, and for the store to notice when they change."""
    decays: tuple[float, float] = (0.1, 0.01)
    """The one to begin with, and another."""
    overlaps: bool = True
    more_betas: tuple[tuple[float, ...], ...] = ()
    """To try when the rest is known, and then rates once more: for the two that are compared above all."""
    only: str | None = None
    """The task that it is for; None for all."""

    def definition(self) -> dict[str, Any]:
        """What a run depends on beside the code and what is searched: results of another one are done again."""
        return self.fixed


def _plain(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Build:
    def build(params: Iterable[nn.Parameter], setting: Setting, _: Course) -> torch.optim.Optimizer:
        return optimizer(params, lr=setting.lr, betas=setting.betas, weight_decay=setting.weight_decay, **options)

    return build


def _sgdm(params: Iterable[nn.Parameter], setting: Setting, _: Course) -> torch.optim.Optimizer:
    return MeanSGD(params, lr=setting.lr, momentum=setting.betas[0], weight_decay=setting.weight_decay)


def _birder(downlink: Downlink) -> Build:
    def build(params: Iterable[nn.Parameter], setting: Setting, course: Course) -> torch.optim.Optimizer:
        beta, *others = setting.betas
        beta_b = others[0] if others else None  # the paper's rule
        decay = setting.weight_decay
        return thinwire.Birder(
            params, setting.lr, beta, weight_decay=decay, beta_b=beta_b, downlink=downlink, seed=course.seed
        )

    return build


def _after_warm_up(optimizer: Callable[..., torch.optim.Optimizer]) -> Build:
    def build(params: Iterable[nn.Parameter], setting: Setting, course: Course) -> torch.optim.Optimizer:
        beta1, beta2 = setting.betas
        chosen = {"lr": setting.lr, "weight_decay": setting.weight_decay}
        return optimizer(params, **chosen, **warm_up(course.steps, (beta1, beta2)))

    return build


def _zero_one_adam(params: Iterable[nn.Parameter], setting: Setting, course: Course) -> torch.optim.Optimizer:
    beta1, beta2 = setting.betas
    decay = setting.weight_decay
    return thinwire.ZeroOneAdam(params, setting.lr, (beta1, beta2), weight_decay=decay, **local_steps(course.steps))


_BIRDER = ((0.7, 0.95), (0.8, 0.95), (0.8,))
_SHORTER = ((0.6, 0.95),)
_ADAM = ((0.9, 0.95), (0.8, 0.95), (0.9, 0.99))
# A variance that is frozen after 15 % of so short a run cannot look back further.
_FROZEN = ((0.9, 0.95), (0.8, 0.95), (0.9, 0.966))
# Compressed differences trail behind the gradient, which is a momentum by itself.
_TRAILING = ((0.0, 0.99), (0.5, 0.99), (0.0, 0.999))

METHODS = {
    method.name: method
    for method in (
        Method("adamw", "AdamW", 5e-3, _ADAM, _plain(MeanAdamW, fused=True), more_betas=((0.7, 0.95),)),
        Method("sgdm", "SGDM", 0.2, ((0.9,), (0.8,), (0.95,)), _sgdm, decays=(1e-3, 0.0), only="pictures"),
        Method("birder-bit", "Birder, bit", 6e-3, _BIRDER, _birder("bit"), {"gain": 2.0}),
        Method("birder-majority", "Birder, majority", 4e-3, _BIRDER, _birder("majority"), {"gain": 1.5}),
        Method("birder-votes", "Birder, votes", 8e-3, _BIRDER, _birder("votes"), {"gain": 1.5}, more_betas=_SHORTER),
        Method("onebit-adam", "1-bit Adam", 5e-3, _FROZEN, _after_warm_up(thinwire.OneBitAdam), {"warm-up": 0.15}),
        Method("zero-one-adam", "0/1 Adam", 5e-3, _FROZEN, _zero_one_adam, {"freeze": 0.15, "interval": 4}),
        Method("onebit-lamb", "1-bit LAMB", 1e-2, _FROZEN, _after_warm_up(thinwire.OneBitLamb), {"warm-up": 0.15}),
        Method("cd-adam", "CD-Adam", 4e-3, _TRAILING, _plain(thinwire.CDAdam)),
        Method(
            "sketched-amsgrad",
            "SketchedAMSGrad",
            4e-3,
            ((0.0, 0.99), (0.5, 0.99), (0.9, 0.99)),
            _plain(thinwire.SketchedAMSGrad, eps=1e-4),
            {"eps": 1e-4},
            overlaps=False,
        ),
        Method("lion", "Distributed Lion", 5e-4, ((0.9, 0.99), (0.95, 0.98), (0.8, 0.95)), _plain(DistributedLion)),
    )
}

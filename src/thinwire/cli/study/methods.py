"""Who takes part in the study, and which settings each of them may try."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from thinwire.cli.registry import OPTIMIZERS, Entry, Search
from thinwire.cli.study.references import DistributedLion, MeanAdamW, MeanSGD


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


def _registered(entry: Entry, search: Search) -> Method:
    def build(params: Iterable[nn.Parameter], setting: Setting, course: Course) -> torch.optim.Optimizer:
        searched = {"lr": setting.lr, "betas": setting.betas, "weight_decay": setting.weight_decay}
        return entry.build(params, entry.whole_run(course.steps, course.seed if search.seeded else None, **searched))

    return Method(
        search.name or entry.name,
        search.title or entry.label,
        search.lr,
        search.betas,
        build,
        dict(search.fixed),
        overlaps=entry.overlaps,
        more_betas=search.more_betas,
    )


_ADAM = ((0.9, 0.95), (0.8, 0.95), (0.9, 0.99))

METHODS = {
    method.name: method
    for method in (
        Method("adamw", "AdamW", 5e-3, _ADAM, _plain(MeanAdamW, fused=True), more_betas=((0.7, 0.95),)),
        Method("sgdm", "SGDM", 0.2, ((0.9,), (0.8,), (0.95,)), _sgdm, decays=(1e-3, 0.0), only="pictures"),
        *(_registered(entry, entry.search) for entry in OPTIMIZERS.values() if entry.search is not None),
        Method("lion", "Distributed Lion", 5e-4, ((0.9, 0.99), (0.95, 0.98), (0.8, 0.95)), _plain(DistributedLion)),
    )
}

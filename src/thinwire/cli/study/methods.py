"""Who takes part in the study, and which settings each of them may try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from thinwire.averaging.averager import GradientAverager
from thinwire.averaging.catalogue import rule_of
from thinwire.cli.averagings import AVERAGINGS, AveragedSignSGD, Averaging
from thinwire.cli.local_runs import LOCAL_RUNS, LocalRun
from thinwire.cli.registry import OPTIMIZERS, Entry, Prepared, Search
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


Prepare = Callable[[nn.Module, Setting, Course], Prepared]
"""Give a model its optimizer."""


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
    prepare: Prepare
    fixed: dict[str, Any] = field(default_factory=dict)
    """Settings that are not searched, for people to read, and for the store to notice when they change."""
    decays: tuple[float, float] = (0.1, 0.01)
    """The one to begin with, and another."""
    overlaps: bool = True
    more_betas: tuple[tuple[float, ...], ...] = ()
    """To try when the rest is known, and then rates once more: for the two that are compared above all."""
    only: str | None = None
    """The task that it is for; None for all."""
    settings_of: str | None = None
    """A method whose best settings it uses, instead of a search of its own."""
    searches_rate: bool = False
    """Whether it searches the learning rate all the same, and has only the other settings of `settings_of`."""
    in_ddp: bool = True
    """Whether a run with processes puts the model in DDP. Otherwise the optimizer gathers gradients by itself."""

    by_default: bool = True
    """Whether it runs unless methods are named."""
    thin: bool = False
    """Whether its results are only in the table and the picture of thin wires."""

    def definition(self) -> dict[str, Any]:
        """What a run depends on beside the code and what is searched: results of another one are done again."""
        return self.fixed


def _plain(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Prepare:
    def prepare(model: nn.Module, setting: Setting, _: Course) -> Prepared:
        searched = {"lr": setting.lr, "betas": setting.betas, "weight_decay": setting.weight_decay}
        return Prepared(optimizer(model.parameters(), **searched, **options), metrics=None)

    return prepare


def _sgdm(model: nn.Module, setting: Setting, _: Course) -> Prepared:
    momentum, decay = setting.betas[0], setting.weight_decay
    return Prepared(MeanSGD(model.parameters(), lr=setting.lr, momentum=momentum, weight_decay=decay), metrics=None)


def _by(entry: Entry | Averaging, *, seeded: bool) -> Prepare:
    def prepare(model: nn.Module, setting: Setting, course: Course) -> Prepared:
        searched = {"lr": setting.lr, "betas": setting.betas, "weight_decay": setting.weight_decay}
        return entry.prepare(model, entry.whole_run(course.steps, course.seed if seeded else None, **searched))

    return prepare


def _registered(entry: Entry, search: Search) -> Method:
    return Method(
        search.name or entry.name,
        search.title or entry.label,
        search.lr,
        search.betas,
        _by(entry, seeded=search.seeded),
        dict(search.fixed),
        overlaps=entry.overlaps,
        more_betas=search.more_betas,
        only=search.only,
        settings_of=search.settings_of,
    )


def _averaged(entry: Averaging) -> Method:
    """AdamW as it is: another setting would hide what the compressor changes. Few bits may need another rate."""
    return replace(
        _ADAMW,
        name=entry.name,
        title=entry.label,
        prepare=_by(entry, seeded=False),
        fixed=entry.definition(),
        overlaps=entry.overlaps,
        more_betas=(),
        settings_of=_ADAMW.name,
        searches_rate=entry.searches_rate,
        in_ddp=True,
    )


def _demo(model: nn.Module, setting: Setting, _: Course) -> Prepared:
    params = list(model.parameters())
    averager = GradientAverager(params, rule_of("dct_topk", {}, residual_decay=setting.betas[0]))
    optimizer = AveragedSignSGD(params, averager, lr=setting.lr, weight_decay=setting.weight_decay)
    return Prepared(optimizer, averager.metrics)


def _in_local_steps(entry: LocalRun) -> Method:
    """AdamW's betas and decay, in local steps. They search a rate: each worker has a part of AdamW's batch only."""

    def prepare(model: nn.Module, setting: Setting, _: Course) -> Prepared:
        searched = {"lr": setting.lr, "betas": setting.betas, "weight_decay": setting.weight_decay}
        return entry.prepare(model, searched)

    return replace(
        _ADAMW,
        name=entry.name,
        title=entry.label,
        prepare=prepare,
        fixed=entry.definition(),
        overlaps=False,
        more_betas=(),
        settings_of=entry.settings_of or _ADAMW.name,
        searches_rate=entry.settings_of is None,
        in_ddp=False,
        by_default=False,
        thin=True,
    )


def _at_its_own_rate(method: Method) -> Method:
    """The same with a learning rate that it searches."""
    name, title = f"{method.name}-own-rate", f"{method.title}, own rate"
    return replace(method, name=name, title=title, searches_rate=True, by_default=False)


_ADAM = ((0.9, 0.95), (0.8, 0.95), (0.9, 0.99))
_SGDM = ((0.9,), (0.8,), (0.95,))
_LION = ((0.9, 0.99), (0.95, 0.98), (0.8, 0.95))
_ADAMW = Method("adamw", "AdamW", 5e-3, _ADAM, _plain(MeanAdamW, fused=True), more_betas=((0.7, 0.95),), in_ddp=False)

_COMPRESSED = (
    *(_averaged(entry) for entry in AVERAGINGS.values() if entry.studied),
    *(_registered(entry, entry.search) for entry in OPTIMIZERS.values() if entry.search is not None),
)

METHODS = {
    method.name: method
    for method in (
        _ADAMW,
        Method(
            "sgdm", "SGDM", 0.2, ((0.9,), (0.8,), (0.95,)), _sgdm, decays=(1e-3, 0.0), only="pictures", in_ddp=False
        ),
        *_COMPRESSED,
        # A delay or few bits may need a lower rate, so the cost is known at both.
        *(
            _at_its_own_rate(method)
            for method in _COMPRESSED
            if method.fixed.get("delay") or method.name == "compress-int2"
        ),
        Method("lion", "Distributed Lion", 5e-4, _LION, _plain(DistributedLion), in_ddp=False),
        Method(
            "demo",
            "DeMo",
            1e-3,
            ((0.999,), (0.99,), (0.9,)),
            _demo,
            {"compressor": "dct_topk", **rule_of("dct_topk", {}).options()},
            in_ddp=False,
            by_default=False,
            thin=True,
        ),
        *(_in_local_steps(entry) for entry in LOCAL_RUNS.values() if entry.studied),
    )
}

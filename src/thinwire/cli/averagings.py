"""The compressors of `thinwire.compress` that the commands offer, for AdamW as it is.

One table for demo, soak, the benchmarks and study, next to that of the optimizers: adding a compressor to all of them
is one entry of `AVERAGINGS`. Chaos has a table of its own (`chaos/subjects.py`). Selftest leaves them out: it reads the
state of an optimizer after every step, and DDP is part of an averaging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.averaging.averager import GradientAverager
from thinwire.averaging.catalogue import SCHEMES, rule_of
from thinwire.cli.registry import ADAMW, OPTIMIZERS, WEIGHT_DECAY, Betas, Command, Entry, Prepared, adamw, offered
from thinwire.cli.stages import ALIKE

COMMANDS: frozenset[Command] = frozenset({"demo", "bench exchange", "bench step"})
"""Those that offer averagings."""


class _AveragesFirst(torch.optim.Optimizer):
    """`step()` averages the gradients as `thinwire.compress` does, but without DDP: for virtual workers, and to measure
    the exchange alone.

    Args:
        params: as in torch.optim.
        averager: averages the gradients of the same parameters.
        **settings: the optimizer's.
    """

    def __init__(self, params: Iterable[nn.Parameter], averager: GradientAverager, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.averager = averager

    def average(self) -> None:
        """Replace the gradients by their means over all workers."""
        self.averager.begin()
        for group in self.param_groups:
            for p in group["params"]:
                self.averager.add(p, p.grad.view(-1))
        self.averager.finish()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of all workers."""
        self.average()
        return super().step(closure)


class AveragedAdamW(_AveragesFirst, torch.optim.AdamW):
    """AdamW with averaged gradients."""


class AveragedSignSGD(_AveragesFirst, thinwire.SignSGD):
    """SignSGD with averaged gradients: DeMo, if they are averaged as it does."""


@dataclass(frozen=True)
class Averaging:
    """AdamW whose gradients a compressor averages."""

    compressor: str
    """Its name in `thinwire.compress`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the compressor."""
    overlaps: bool = True
    """Whether it sends while backward runs."""
    studied: bool = True
    """Whether it takes part in `thinwire study`, with AdamW's settings."""
    searches_rate: bool = False
    """Whether it searches a learning rate there all the same: with few bits a smaller one may be better."""
    delay: int = 0
    """Of `thinwire.compress`."""
    commands: frozenset[Command] = COMMANDS

    stages = ALIKE

    @property
    def name(self) -> str:
        """On the command line."""
        return f"compress-{self.compressor}{'-delay' if self.delay else ''}"

    @property
    def label(self) -> str:
        """In texts and tables."""
        return f"AdamW, {self.compressor}{', delay=1' if self.delay else ''}"

    def bits(self, workers: int) -> tuple[float, float] | None:
        """Bits per parameter that a worker sends, and an owner to each worker; None if they depend on shapes."""
        scheme = SCHEMES.get(self.compressor)
        return None if scheme is None else scheme(**self.options).bits_per_value(workers)

    def definition(self) -> dict[str, Any]:
        """The compressor with all its options, including those that it has by default, as JSON has them."""
        settings = rule_of(self.compressor, self.options).settings() | ({"delay": self.delay} if self.delay else {})
        return {name: str(value) if isinstance(value, torch.dtype) else value for name, value in settings.items()}

    def whole_run(
        self,
        steps: int,
        seed: int | None,
        *,
        lr: float | None = None,
        betas: Betas = ADAMW["betas"],
        weight_decay: float = WEIGHT_DECAY,
    ) -> dict[str, Any]:
        """Arguments of AdamW, which are its own: they depend neither on the compressor nor on the seed."""
        settings = {**adamw(steps), "betas": betas, "weight_decay": weight_decay}
        return settings if lr is None else {**settings, "lr": lr}

    def measured(self) -> dict[str, Any]:
        """Arguments of AdamW for benchmarks: those of the baseline."""
        return {"fused": True}

    def alone(self, params: Iterable[nn.Parameter], settings: Mapping[str, Any], **wire: Any) -> AveragedAdamW:
        """AdamW that averages in `step()`. `wire` has options such as `topology` and `bucket_mb`."""
        params = list(params)
        averager = GradientAverager(params, rule_of(self.compressor, self.options), delay=self.delay, **wire)
        return AveragedAdamW(params, averager, **settings)

    def prepare(self, model: nn.Module, settings: Mapping[str, Any], **wire: Any) -> Prepared:
        """Give a model an optimizer: `thinwire.compress` and AdamW if it is in DDP, otherwise `alone`."""
        if isinstance(model, DistributedDataParallel):
            compression = thinwire.compress(model, self.compressor, delay=self.delay, **wire, **self.options)
            return Prepared(torch.optim.AdamW(model.parameters(), **settings), compression.metrics)
        optimizer = self.alone(model.parameters(), settings, **wire)
        return Prepared(optimizer, optimizer.averager.metrics)


_ENTRIES = (
    Averaging("int8"),
    Averaging("int4"),
    Averaging("int4", delay=1, commands=frozenset({"bench step"})),
    Averaging("int3"),
    Averaging("int2"),
    Averaging("int1", searches_rate=True),
    Averaging("topk", options={"ratio": 0.01}, searches_rate=True),
    Averaging("gtopk", options={"ratio": 0.03}, searches_rate=True),
    Averaging("powersgd", options={"rank": 4}, overlaps=False, studied=False),
)

AVERAGINGS: dict[str, Averaging] = {entry.name: entry for entry in _ENTRIES}
"""All entries by name."""

Contender = Entry | Averaging
"""What takes the place of DDP + AdamW in a command."""


def contenders(command: Command) -> dict[str, Contender]:
    """The optimizers and averagings of a command, by name."""
    return {**offered(command), **{name: entry for name, entry in AVERAGINGS.items() if command in entry.commands}}


def contender(name: str, downlink: str | None = None) -> Contender:
    """The optimizer or averaging with a name. A downlink of None is the optimizer's own."""
    if name in AVERAGINGS:
        return AVERAGINGS[name]
    return OPTIMIZERS[name].with_downlink(downlink)

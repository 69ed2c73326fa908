"""How fast a whole update is between local ranks, as ratios to what people use today, in the same run.

Both sides live in the same processes and take turns, so that a noisy neighbour hits both alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.cli.averagings import Averaging, Contender, contender
from thinwire.cli.charlm import CharTransformer, ModelShape
from thinwire.cli.launch import Report
from thinwire.cli.memory import peak_bytes
from thinwire.optimizers.optimizer import WireOptimizer

SHAPE = ModelShape(layers=9, width=256, context=64)
"""A transformer of about 7 M parameters."""
VOCABULARY = 96


@dataclass(frozen=True)
class ExchangeConfig:
    """What to measure, and how often. ``optimizer`` is the name of a contender."""

    optimizer: str
    elements: int
    repeats: int
    batch: int
    downlink: str | None
    bucket_mb: float | None

    @property
    def contender(self) -> Contender:
        """What is measured."""
        return contender(self.optimizer, self.downlink)

    def exchange(self, p: nn.Parameter, settings: Mapping[str, Any]) -> Exchange:
        """The exchange of one parameter, without DDP."""
        measured = self.contender
        if isinstance(measured, Averaging):
            adamw = measured.alone([p], {}, bucket_mb=self.bucket_mb)
            return Exchange(adamw.average, adamw.averager)
        optimizer = measured.build([p], {**settings, "bucket_mb": self.bucket_mb})
        return Exchange(optimizer.step, optimizer)


@dataclass(frozen=True)
class Exchange:
    """An update by one of thinwire's optimizers, or the averaging of a gradient."""

    run: Callable[[], object]
    by: WireOptimizer
    """What holds the state and the packets."""


@dataclass(frozen=True)
class ExchangeResult:
    """One comparison: ours, the baseline, and their ratio."""

    name: str
    value: float
    unit: str
    baseline: str
    baseline_value: float
    ratio: float
    higher_is_better: bool
    details: dict[str, Any]


@dataclass(frozen=True)
class RepeatDone:
    """A sign of life from rank 0."""

    what: str
    done: int
    of: int


def measure(report: Report, config: ExchangeConfig) -> list[ExchangeResult]:
    """Run on every rank; rank 0 reports `RepeatDone`s."""
    ours = nn.Parameter(torch.ones(config.elements))  # ones, not zeros, whose pages would not exist yet
    torch.manual_seed(dist.get_rank())  # as in training: optimizers warn of ranks with equal gradients
    ours.grad = torch.randn(config.elements)
    return [_memory(ours, config), _update(report, ours, config), _training_step(report, config)]


def _memory(ours: nn.Parameter, config: ExchangeConfig) -> ExchangeResult:
    """The most that the optimizer of one big parameter takes, over steps of every kind."""
    # The first optimizer of a process imports half of torch, and the first exchange opens connections: not our state.
    small = nn.Parameter(torch.ones(64))
    small.grad = torch.randn(64)
    _largest_tensor_bytes(small, config)
    before = peak_bytes(reset=True)
    counted = _largest_tensor_bytes(ours, config)
    extra = counted if before is None else (peak_bytes(reset=False) or 0) - before
    if isinstance(config.contender, Averaging):
        name, baseline, theirs = "peak memory beyond DDP's and AdamW's", "a gradient in fp32", 4.0
    else:
        name, baseline, theirs = "peak memory beyond parameters and gradients", "AdamW's two fp32 moments", 8.0
    return ExchangeResult(
        name=name,
        value=extra / config.elements,
        unit="bytes per parameter",
        baseline=baseline,
        baseline_value=theirs,
        ratio=extra / config.elements / theirs,
        higher_is_better=False,
        details={"bytes_in_tensors_per_parameter": counted / config.elements},
    )


def _largest_tensor_bytes(ours: nn.Parameter, config: ExchangeConfig) -> int:
    """Take a step of every kind; the most bytes in tensors after any of them, touched or not."""
    settings, steps = config.contender.stages.every_kind
    exchange = config.exchange(ours, {**config.contender.options, **settings})
    largest = 0
    for _ in range(steps):
        exchange.run()
        largest = max(largest, _tensor_bytes(exchange.by))
    return largest


def _update(report: Report, ours: nn.Parameter, config: ExchangeConfig) -> ExchangeResult:
    """Encode to applied, for one big gradient that is already there; or encode to decoded, if AdamW applies it."""
    exchange = config.exchange(ours, config.contender.measured())
    settle(config, exchange.run)
    assert ours.grad is not None
    theirs = nn.Parameter(torch.zeros(config.elements))
    theirs.grad = ours.grad.clone()
    adamw = torch.optim.AdamW([theirs], fused=True)
    stage = config.contender.stages.measured_name
    if isinstance(config.contender, Averaging):
        name, baseline, applies = f"average of {config.elements:,} elements", "all_reduce of fp32", False
    else:
        name = f"update of {config.elements:,} elements{stage}, encode to applied"
        baseline, applies = "all_reduce of fp32 + fused AdamW", True

    def all_reduce() -> None:
        assert theirs.grad is not None
        dist.all_reduce(theirs.grad)
        if applies:
            adamw.step()

    before = exchange.by.metrics()
    mine, other = take_turns(report, "update", config.repeats, exchange.run, all_reduce)
    return _speed_up(name, mine, baseline, other, details=_where_time_went(before, exchange.by.metrics()))


def _training_step(report: Report, config: ExchangeConfig) -> ExchangeResult:
    """Forward, backward and step of the 7 M transformer."""
    torch.manual_seed(0)
    ours, theirs = (DistributedDataParallel(CharTransformer(VOCABULARY, SHAPE)) for _ in range(2))
    prepared = config.contender.prepare(ours, config.contender.measured(), bucket_mb=config.bucket_mb)
    assert prepared.metrics is not None, "thinwire exchanges"
    adamw = torch.optim.AdamW(theirs.parameters(), fused=True)
    windows = torch.randint(VOCABULARY, (config.batch, SHAPE.context + 1))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            model(windows[:, :-1], windows[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    parameters, stage = sum(p.numel() for p in ours.parameters()), config.contender.stages.measured_name
    train_ours = train(ours, prepared.optimizer)
    settle(config, train_ours)
    before = prepared.metrics()
    mine, baseline = take_turns(report, "step", config.repeats, train_ours, train(theirs, adamw))
    return _speed_up(
        f"training step of a transformer of {parameters / 1e6:.1f} M parameters{stage}, overlapped",
        mine,
        "DDP + fused AdamW",
        baseline,
        details=_where_time_went(before, prepared.metrics()),
    )


def settle(config: ExchangeConfig, step: Callable[[], object]) -> None:
    """Take the steps that come before the stage to be measured."""
    for _ in range(config.contender.stages.settling_steps):
        step()


def take_turns(
    report: Report, what: str, repeats: int, ours: Callable[[], object], theirs: Callable[[], object]
) -> tuple[list[float], list[float]]:
    """The seconds of each, as all ranks take them together; the first turns do not count."""
    taken: tuple[list[float], list[float]] = ([], [])
    warm_up = 2
    for turn in range(repeats + warm_up):
        for side, run in enumerate((ours, theirs)):
            dist.barrier()
            began = time.perf_counter()
            run()
            # A step is over when the slowest rank is through with it.
            dist.barrier()
            if turn >= warm_up:
                taken[side].append(time.perf_counter() - began)
        report(RepeatDone(what, turn + 1, repeats + warm_up))
    return taken


def _speed_up(
    name: str, ours: list[float], baseline: str, theirs: list[float], *, details: dict[str, Any]
) -> ExchangeResult:
    mine, other = statistics.median(ours), statistics.median(theirs)
    spread = {"seconds": _quartiles(ours), "baseline_seconds": _quartiles(theirs)}
    return ExchangeResult(name, mine, "s", baseline, other, other / mine, True, {**spread, **details})


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4)


def _where_time_went(before: thinwire.Metrics, after: thinwire.Metrics) -> dict[str, Any]:
    steps = after.steps - before.steps
    spent = ("encode_seconds", "merge_seconds", "apply_seconds", "wire_seconds", "exposed_wait_seconds")
    return {name: (getattr(after, name) - getattr(before, name)) / steps for name in (*spent, "bytes_sent", "rounds")}


def _tensor_bytes(optimizer: WireOptimizer) -> int:
    """All tensors that the optimizer holds, state or packets or anything else, but for parameters and gradients."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    ahead: list[Any] = [optimizer]
    while ahead:
        found = ahead.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(found, dict):
            ahead += [*found.keys(), *found.values()]
        elif isinstance(found, list | tuple):
            ahead += found
        elif type(found).__module__.startswith("thinwire."):
            ahead += getattr(found, "__dict__", {}).values()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for given in (*params, *(p.grad for p in params if p.grad is not None)):
        storages.pop(given.untyped_storage().data_ptr(), None)
    return sum(storages.values())

"""How fast a whole update is between local ranks, as ratios to what people use today, in the same run.

Both sides live in the same processes and take turns, so that a noisy neighbour hits both alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.cli.charlm import CharTransformer, ModelShape
from thinwire.cli.launch import Report
from thinwire.codecs.stochastic_sign import Downlink

SHAPE = ModelShape(layers=9, width=256, context=64)
"""A transformer of about 7 M parameters."""
VOCABULARY = 96


@dataclass(frozen=True)
class Plan:
    """What to measure, and how often."""

    elements: int
    repeats: int
    batch: int
    downlink: Downlink
    bucket_mb: float | None


@dataclass(frozen=True)
class Row:
    """One comparison: ours, the baseline, and their ratio."""

    name: str
    value: float
    unit: str
    baseline: str
    baseline_value: float
    ratio: float
    bar: float
    higher_is_better: bool
    details: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """A sign of life from rank 0."""

    what: str
    done: int
    of: int


def measure(report: Report, plan: Plan) -> None:
    """Run on every rank; rank 0 reports `Turn`s, and each `Row` when it is known."""
    memory, update = _update(report, plan)
    report(memory)
    report(update)
    report(_training_step(report, plan))


def _update(report: Report, plan: Plan) -> tuple[Row, Row]:
    """Encode to applied, for one big gradient that is already there."""
    grad = torch.randn(plan.elements)
    ours = nn.Parameter(torch.ones(plan.elements))  # ones, not zeros, whose pages would not exist yet
    ours.grad = grad
    # The first optimizer of a process imports half of torch, and the first exchange opens connections: not our state.
    small = nn.Parameter(torch.ones(64))
    small.grad = torch.ones(64)
    _birder([small], plan).step()
    before = _peak_bytes(reset=True)
    birder = _birder([ours], plan)
    birder.step()
    birder.step()
    counted = _tensor_bytes(birder)
    extra = counted if before is None else (_peak_bytes(reset=False) or 0) - before
    memory = Row(
        name="peak memory beyond parameters and gradients",
        value=extra / plan.elements,
        unit="bytes a parameter",
        baseline="AdamW's two fp32 moments",
        baseline_value=8.0,
        ratio=extra / plan.elements / 8.0,
        bar=8.6 / 8.0,
        higher_is_better=False,
        details={"bytes_in_tensors_per_parameter": counted / plan.elements},
    )

    theirs = nn.Parameter(torch.zeros(plan.elements))
    theirs.grad = grad.clone()
    adamw = torch.optim.AdamW([theirs], fused=True)

    def all_reduce_and_adamw() -> None:
        assert theirs.grad is not None
        dist.all_reduce(theirs.grad)
        adamw.step()

    metrics = birder.metrics()
    mine, baseline = _take_turns(report, "update", plan.repeats, birder.step, all_reduce_and_adamw)
    return memory, _speed_up(
        f"update of {plan.elements:,} elements, encode to applied",
        mine,
        "all_reduce of fp32 + fused AdamW",
        baseline,
        bar=3.0,
        details=_where_time_went(metrics, birder.metrics()),
    )


def _training_step(report: Report, plan: Plan) -> Row:
    """Forward, backward and step of the 7 M transformer."""
    torch.manual_seed(0)
    ours, theirs = (DistributedDataParallel(CharTransformer(VOCABULARY, SHAPE)) for _ in range(2))
    birder = _birder(ours.parameters(), plan)
    thinwire.attach(ours, birder)
    adamw = torch.optim.AdamW(theirs.parameters(), fused=True)
    windows = torch.randint(VOCABULARY, (plan.batch, SHAPE.context + 1))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            model(windows[:, :-1], windows[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    parameters = sum(p.numel() for p in ours.parameters())
    before = birder.metrics()
    mine, baseline = _take_turns(report, "step", plan.repeats, train(ours, birder), train(theirs, adamw))
    return _speed_up(
        f"training step of a transformer of {parameters / 1e6:.1f} M parameters, overlapped",
        mine,
        "DDP + fused AdamW",
        baseline,
        bar=1.2,
        details=_where_time_went(before, birder.metrics()),
    )


def _birder(params: Any, plan: Plan) -> thinwire.Birder:
    return thinwire.Birder(params, downlink=plan.downlink, bucket_mb=plan.bucket_mb)


def _take_turns(
    report: Report, what: str, repeats: int, ours: Callable[[], object], theirs: Callable[[], object]
) -> tuple[list[float], list[float]]:
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
        report(Turn(what, turn + 1, repeats + warm_up))
    return taken


def _speed_up(
    name: str, ours: list[float], baseline: str, theirs: list[float], *, bar: float, details: dict[str, Any]
) -> Row:
    mine, other = statistics.median(ours), statistics.median(theirs)
    spread = {"seconds": _quartiles(ours), "baseline_seconds": _quartiles(theirs)}
    return Row(name, mine, "s", baseline, other, other / mine, bar, True, {**spread, **details})


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4)


def _where_time_went(before: thinwire.Metrics, after: thinwire.Metrics) -> dict[str, Any]:
    steps = after.steps - before.steps
    spent = ("encode_seconds", "vote_seconds", "apply_seconds", "wire_seconds", "exposed_wait_seconds")
    return {name: (getattr(after, name) - getattr(before, name)) / steps for name in (*spent, "bytes_sent", "rounds")}


def _tensor_bytes(optimizer: thinwire.Birder) -> int:
    """All tensors that the optimizer holds: state and packets."""
    mail = optimizer._mail
    storages: dict[int, int] = {}
    tensors: list[Tensor] = [mail.sent, mail.answers, *(frame.received for frame in mail.frames)]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _peak_bytes(*, reset: bool) -> int | None:
    """The most memory that this process has held since the last reset; None where the system does not tell."""
    process = Path("/proc/self")
    if not (process / "clear_refs").exists():
        return None
    if reset:
        (process / "clear_refs").write_text("5")
    status = (process / "status").read_text().splitlines()
    peak = next(line for line in status if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024

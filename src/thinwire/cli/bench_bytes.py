"""What optimizers send over a whole run, counted in one between local ranks, against averaging in fp32 at every step.

Bytes do not depend on what is learnt, so the gradient is random and stays the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.cli.bench_exchange import RepeatDone
from thinwire.cli.launch import Report
from thinwire.cli.registry import OPTIMIZERS
from thinwire.cli.stages import QUANTISED_SHARE, warm_up
from thinwire.optimizers.optimizer import WireOptimizer

_TURNS = 100
"""How often rank 0 shows life in a run."""


@dataclass(frozen=True)
class CountedRun:
    """An optimizer, and how long a run of it is."""

    label: str
    optimizer: Callable[..., WireOptimizer]
    settings: dict[str, Any]
    steps: int


def runs(steps: int) -> list[CountedRun]:
    """All that are counted; `steps` is the length of the longest.

    0/1 Adam takes all of them. The ratio of the others does not depend on their number, nor does the share of 1-bit
    Adam's warm-up: they take a tenth.
    """
    tenth = max(1, steps // 10)

    def run(name: str, steps: int, settings: dict[str, Any], note: str = "") -> CountedRun:
        entry = OPTIMIZERS[name]
        return CountedRun(entry.label + note, entry.optimizer, {**entry.options, **settings}, steps)

    return [
        run("onebit-adam", tenth, warm_up(tenth, (0.9, 0.999)), note=", 15 % warm-up"),
        run(
            "onebit-adam-4bit",
            tenth,
            warm_up(tenth, (0.9, 0.999), QUANTISED_SHARE),
            note=f" of {QUANTISED_SHARE:.0%}".replace("%", " %"),
        ),
        run("zero-one-adam", steps, {}),
        run("cd-adam", tenth, {}),
        run("sketched-amsgrad", tenth, {}),
    ]


@dataclass(frozen=True)
class BytesResult:
    """What one run has sent, in bytes a rank."""

    name: str
    settings: dict[str, Any]
    steps: int
    dense_steps: int
    """That sent more than a byte an element."""
    silent_steps: int
    """That sent nothing."""
    bytes_sent: float
    baseline: str
    baseline_bytes: float
    ratio: float


@dataclass(frozen=True)
class BytesConfig:
    """How long to run, and with how many parameters."""

    elements: int
    steps: int


def measure(report: Report, config: BytesConfig) -> list[BytesResult]:
    """Run on every rank; rank 0 reports `RepeatDone`s. Returns one `BytesResult` per run."""
    return [_count(report, run, config.elements) for run in runs(config.steps)]


def _count(report: Report, run: CountedRun, elements: int) -> BytesResult:
    torch.manual_seed(dist.get_rank())
    parameter = nn.Parameter(torch.ones(elements))
    parameter.grad = torch.randn(elements)
    optimizer = run.optimizer([parameter], **run.settings)
    kinds: Counter[str] = Counter()
    sent = 0
    for step in range(1, run.steps + 1):
        optimizer.step()
        if step == run.steps:
            optimizer.synchronize()  # a model is there to be used
        before, sent = sent, optimizer.metrics().bytes_sent
        kinds["silent" if sent == before else "dense" if sent - before > elements else "signs"] += 1
        if step * _TURNS // run.steps > (step - 1) * _TURNS // run.steps:
            report(RepeatDone(run.label, step, run.steps))
    ranks = dist.get_world_size()
    total = torch.tensor(float(sent), dtype=torch.float64)
    dist.all_reduce(total)
    dense = 2 * (ranks - 1) / ranks * 4 * elements * run.steps
    mean = total.item() / ranks
    return BytesResult(
        name=run.label,
        settings=run.settings,
        steps=run.steps,
        dense_steps=kinds["dense"],
        silent_steps=kinds["silent"],
        bytes_sent=mean,
        baseline="2(n-1)/n · 4 bytes per parameter and step",
        baseline_bytes=dense,
        ratio=mean / dense,
    )

"""``thinwire soak``: very many steps of a tiny model, and whether a process grows by them.

What leaks a little at every step is found by no test of a few of them, and ends a run of weeks.
"""

from __future__ import annotations

import gc
import json as json_format
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.cli.averagings import contender, contenders
from thinwire.cli.launch import Report, run_local_ranks
from thinwire.cli.options import MOST_RANKS, integer, optimizer_name, output_file
from thinwire.cli.units import byte_count
from thinwire.testbed.supervisor import ChildError

SAMPLES = 100
"""How often a run is looked at."""
SETTLED = 0.1
"""The share of a run after which nothing has a reason to grow."""
RSS_LIMIT = 0.01
"""By how much a process may be larger in the end."""
_PROCESS = Path("/proc/self")
_COUNTS, _MOMENT = 3, 0.01


@dataclass(frozen=True)
class Sample:
    """What a rank holds after so many steps."""

    step: int
    rss_bytes: int
    """Memory that is resident."""
    descriptors: int
    """Open files, sockets and the like."""
    threads: int
    objects: int
    """Those of Python's garbage collector that were made since training began."""


@dataclass(frozen=True)
class Growth:
    """What has become of a rank, from when it had settled to the end."""

    rank: int
    settled: Sample
    end: Sample

    @property
    def rss_growth(self) -> float:
        """As a share."""
        return self.end.rss_bytes / self.settled.rss_bytes - 1

    def complaints(self) -> list[str]:
        """What it should not have done, for people to read."""
        told = []
        if self.rss_growth >= RSS_LIMIT:
            told.append(f"rank {self.rank}: memory has grown by {self.rss_growth:.2%}, the limit is {RSS_LIMIT:.0%}")
        for name in ("descriptors", "threads"):
            before, after = getattr(self.settled, name), getattr(self.end, name)
            if before != after:
                told.append(f"rank {self.rank}: {after} {name}, {before} at step {self.settled.step}")
        return told


def growth_of(rank: int, samples: Sequence[Sample]) -> Growth:
    """What has become of a rank whose last sample is of the last step."""
    steps = samples[-1].step
    return Growth(rank, next(sample for sample in samples if sample.step >= SETTLED * steps), samples[-1])


@dataclass(frozen=True)
class SoakConfig:
    """What to run. ``optimizer`` is the name of a contender."""

    optimizer: str
    steps: int


@dataclass(frozen=True)
class SoakProgress:
    """A sign of life from rank 0."""

    step: int
    seconds: float


@dataclass(frozen=True)
class SoakResult:
    """What all ranks have seen."""

    seconds: float
    samples: list[list[Sample]]
    """A list a rank."""


def train(report: Report, config: SoakConfig) -> SoakResult:
    """Run on every rank; rank 0 reports `SoakProgress`."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)))
    trained = contender(config.optimizer)
    optimizer = trained.prepare(model, trained.whole_run(config.steps, seed=0)).optimizer
    inputs = torch.Generator().manual_seed(dist.get_rank())
    due = sample_steps(config.steps)
    samples: list[Sample] = []
    gc.collect()
    gc.freeze()  # all that torch has made so far need not be counted, nor gone through, at every look
    began = time.perf_counter()
    for step in range(1, config.steps + 1):
        batch = torch.randn(8, 16, generator=inputs)
        (model(batch) - batch[:, :4]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in due:
            samples.append(look(step, samples[-1] if samples else None))
            report(SoakProgress(step, time.perf_counter() - began))
    seconds = time.perf_counter() - began
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, samples)
    return SoakResult(seconds, of_ranks)


def sample_steps(steps: int) -> set[int]:
    """The steps after which to look: a hundred, equally far apart, the last one among them."""
    return {-(-i * steps // SAMPLES) for i in range(1, SAMPLES + 1)}


def look(step: int, before: Sample | None = None) -> Sample:
    """What this process holds now; `before` is what it held when it was looked at last."""
    gc.collect()  # what is waiting to be collected has not leaked
    pages = int((_PROCESS / "statm").read_text().split()[1])
    return Sample(
        step=step,
        rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        descriptors=_entries("fd", None if before is None else before.descriptors),
        threads=_entries("task", None if before is None else before.threads),
        objects=len(gc.get_objects()),
    )


def _entries(folder: str, before: int | None) -> int:
    """How many there are: as many as before, or the least of a few counts, as a thread takes a moment to end."""
    counts = [len(os.listdir(_PROCESS / folder))]
    while counts[-1] != before and len(counts) < _COUNTS:
        time.sleep(_MOMENT)
        counts.append(len(os.listdir(_PROCESS / folder)))
    return min(counts)


def soak(
    steps: Annotated[int, integer(10, "Training steps.")] = 50_000,
    ranks: Annotated[int, integer(1, "Worker processes on this machine.", maximum=MOST_RANKS)] = 4,
    optimizer: Annotated[str, optimizer_name(contenders("demo"), "What trains")] = "birder",
    json: Annotated[Path | None, output_file("Write all samples to this file.")] = None,
) -> None:
    """Train a tiny model for many steps, and check that no rank's memory, descriptors or threads grow.

    Every rank is looked at a hundred times. From a tenth of the run on memory may grow by less than 1 %, and the number
    of descriptors and of threads must stay as it is; otherwise the exit code is 1.
    """
    if not (_PROCESS / "statm").exists():
        typer.echo(f"thinwire soak: needs {_PROCESS}, which only Linux has", err=True)
        raise typer.Exit(1)
    console = Console()

    def show(message: SoakProgress) -> None:
        if console.is_terminal:
            rate = message.step / message.seconds
            console.print(f"{message.step:,} of {steps:,} steps, {rate:,.0f} steps/s", end="\r", highlight=False)

    try:
        outcome: SoakResult = run_local_ranks(train, ranks, (SoakConfig(optimizer, steps),), show)
    except ChildError as error:
        typer.echo(f"thinwire soak: {error}", err=True)
        raise typer.Exit(1) from None
    growths = [growth_of(rank, samples) for rank, samples in enumerate(outcome.samples)]
    complaints = [complaint for growth in growths for complaint in growth.complaints()]
    _print_table(console, f"{steps:,} steps of {optimizer} on {ranks} ranks", growths)
    console.print(f"{steps / outcome.seconds:,.0f} steps/s", highlight=False)
    for complaint in complaints:
        console.print(complaint, highlight=False)
    if json is not None:
        _write(json, SoakConfig(optimizer, steps), outcome, growths, complaints)
    if complaints:
        raise typer.Exit(1)


def _print_table(console: Console, title: str, growths: Sequence[Growth]) -> None:
    table = Table(title=f"{title}: at {SETTLED:.0%} → in the end")
    for column in ("rank", "memory", "growth", "descriptors", "threads", "Python's objects"):
        table.add_column(column, justify="right")
    for growth in growths:
        pair = (growth.settled, growth.end)
        table.add_row(
            str(growth.rank),
            " → ".join(byte_count(sample.rss_bytes) for sample in pair),
            f"{growth.rss_growth:+.2%}",
            *(" → ".join(f"{getattr(s, name):,}" for s in pair) for name in ("descriptors", "threads", "objects")),
        )
    console.print(table)


def _write(
    path: Path, config: SoakConfig, outcome: SoakResult, growths: Sequence[Growth], complaints: Sequence[str]
) -> None:
    results = {
        **asdict(config),
        "steps_per_second": config.steps / outcome.seconds,
        "rss_limit": RSS_LIMIT,
        "ranks": [
            {
                "rss_growth": growth.rss_growth,
                "settled": asdict(growth.settled),
                "samples": [asdict(s) for s in samples],
            }
            for growth, samples in zip(growths, outcome.samples, strict=True)
        ],
        "complaints": list(complaints),
    }
    path.write_text(json_format.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")

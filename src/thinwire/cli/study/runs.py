"""One run of the study: train, look at the model now and then, and count what was sent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import thinwire
from thinwire.cli import launch
from thinwire.cli.registry import Prepared
from thinwire.cli.schedule import is_due, learning_rate_factor
from thinwire.cli.study.methods import METHODS, Course, Setting
from thinwire.cli.study.tasks import LAST_RATE, Score, Task
from thinwire.optimizers.optimizer import WireOptimizer
from thinwire.transport import virtual

VALIDATIONS = 12
Tell = Callable[[int], None]
"""Hears of every step."""


@dataclass(frozen=True)
class Run:
    """Everything that decides the bits of a run."""

    task: Task
    method: str
    setting: Setting
    seed: int


@dataclass(frozen=True)
class Point:
    """What the model was worth after a step."""

    step: int
    score: Score


@dataclass(frozen=True)
class Result:
    """What a run showed. One that diverged has a score of NaN from there on."""

    setting: Setting
    seed: int
    points: list[Point]
    bytes_sent: list[tuple[int, float]]
    """By each worker, step after step: how many steps in a row sent how much each."""
    compute_seconds: float
    """Forward and backward of one worker, on a core of its own."""
    parameters: int

    @property
    def final(self) -> Score:
        """At the end."""
        return self.points[-1].score

    def to_json(self) -> dict[str, Any]:
        """For a store; what is not finite is null there."""
        return {
            "setting": asdict(self.setting),
            "seed": self.seed,
            "points": [
                [point.step, *(_finite(each) for each in (point.score.loss, point.score.accuracy))]
                for point in self.points
            ],
            "bytes_sent": self.bytes_sent,
            "compute_seconds": self.compute_seconds,
            "parameters": self.parameters,
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Result:
        """What `to_json` gave."""
        scores = ((step, math.nan if loss is None else loss, accuracy) for step, loss, accuracy in stored["points"])
        points = [Point(step, Score(loss, accuracy)) for step, loss, accuracy in scores]
        return cls(
            Setting(**{**stored["setting"], "betas": tuple(stored["setting"]["betas"])}),
            stored["seed"],
            points,
            [(steps, sent) for steps, sent in stored["bytes_sent"]],
            stored["compute_seconds"],
            stored["parameters"],
        )


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 6)


def _told_nobody(_: int) -> None:
    pass


def run_virtually(run: Run, tell: Tell = _told_nobody) -> Result:
    """Train with virtual workers: one core, and the bits of `run_really`."""
    return virtual.run_workers(run.task.workers, train, run, tell)[0]


def run_really(run: Run, tell: Tell = _told_nobody) -> Result:
    """Train with one process per worker, and with DDP."""
    return launch.run_local_ranks(_train_in_process, run.task.workers, (run,), tell)


def _train_in_process(report: launch.Report, run: Run) -> Result:
    rank = torch.distributed.get_rank()
    return train(rank, run.task.workers, run, report, ddp=True)


def train(worker: int, workers: int, run: Run, tell: Tell, *, ddp: bool = False) -> Result:
    """What one of the workers does; worker 0 looks at the model.

    Args:
        worker: which.
        workers: of how many.
        run: what to do.
        tell: hears of worker 0's steps.
        ddp: whether there are processes for DDP, so that thinwire exchanges while backward runs.
    """
    task = run.task
    torch.manual_seed(run.seed)
    model = task.model()
    parameters = list(model.parameters())
    method = METHODS[run.method]
    trained: nn.Module = DistributedDataParallel(model) if ddp and method.in_ddp else model
    prepared = method.prepare(trained, run.setting, Course(task.steps, run.seed))
    optimizer = prepared.optimizer
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, task.steps, LAST_RATE))
    # One order for all workers, of which each takes its row: it depends on the seed alone.
    order = torch.Generator().manual_seed(run.seed)
    elements = sum(p.numel() for p in parameters)
    meter = _ByteMeter(prepared, workers, elements)
    points: list[Point] = []
    computing: list[float] = []
    for step in range(1, task.steps + 1):
        batch = task.take(torch.randint(task.examples, (workers, task.batch), generator=order)[worker])
        try:
            begin = time.thread_time()
            trained(*batch).backward()
            computing.append(time.thread_time() - begin)
            optimizer.step()
        except thinwire.TooManySkips:  # on all workers: it has diverged
            rest = range(step, task.steps + 1)
            points += [Point(later, Score(math.nan)) for later in rest if is_due(later, task.steps, VALIDATIONS)]
            meter.note(len(rest))
            break
        schedule.step()
        optimizer.zero_grad()
        if worker == 0:
            tell(step)
        if is_due(step, task.steps, VALIDATIONS):
            last = step == task.steps
            # Local steps are looked at where workers last agreed, which sends nothing; at the end they come together.
            if isinstance(optimizer, WireOptimizer) or (last and isinstance(optimizer, thinwire.LocalSteps)):
                optimizer.synchronize()
            if worker == 0:
                agreed = optimizer.at_reference() if isinstance(optimizer, thinwire.LocalSteps) else nullcontext()
                with torch.no_grad(), agreed:
                    points.append(Point(step, task.validate(model, last=last)))
        meter.note()
    return Result(run.setting, run.seed, points, meter.lengths, median(computing), elements)


class _ByteMeter:
    """What a worker sends in each step: counted, or what its bits make in a reduce-scatter and an all-gather."""

    def __init__(self, prepared: Prepared, workers: int, elements: int) -> None:
        self._metrics = prepared.metrics
        bits = getattr(prepared.optimizer, "bits", 0.0)
        self._each = 2 * (workers - 1) / workers * bits / 8 * elements
        self._before = 0.0
        self.lengths: list[tuple[int, float]] = []

    def note(self, steps: int = 1) -> None:
        """A step is over, or will not be taken, nor any after it."""
        sent = self._each
        if self._metrics is not None:
            total = self._metrics().bytes_sent
            sent, self._before = total - self._before, total
        if self.lengths and self.lengths[-1][1] == sent:
            self.lengths[-1] = (self.lengths[-1][0] + steps, sent)
        else:
            self.lengths.append((steps, sent))

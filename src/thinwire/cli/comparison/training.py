"""One run of the demo: what every worker does, and what rank 0 reports of it."""

from __future__ import annotations

import gc
import math
import time
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from thinwire.cli.averagings import Contender, contender
from thinwire.cli.charlm import CharTransformer, Corpus, ModelShape
from thinwire.cli.comparison.pace import Budget, PredictedClock
from thinwire.cli.launch import Report
from thinwire.cli.registry import Prepared, adamw
from thinwire.cli.schedule import is_due, learning_rate_factor
from thinwire.optimizers.optimizer import WireOptimizer
from thinwire.testbed import LinkCounter

EVALUATIONS = 12
PROBES = 12
TRIAL_STEPS = 12
TRIAL_PROBES = 5
# A trial on very slow links ends early, but not before the second step: the first one builds DDP's buckets.
TRIAL_SHARE, SHORTEST_TRIAL = 0.2, 2
# The first steps build DDP's buckets, fault memory in and fill caches; they are not typical of the rest.
WARM_UP_STEPS = 10
VALIDATION_WINDOWS = 512
VALIDATION_BATCH = 32
# To show progress, the parent needs a core that the workers use.
SECONDS_BETWEEN_REPORTS = 0.25


@dataclass(frozen=True)
class TrainingConfig:
    """Everything that decides a run. ``optimizer`` is the name of a contender, or None for AdamW."""

    text: str
    shape: ModelShape
    batch: int
    budget: Budget
    seed: int
    optimizer: str | None
    downlink: str | None = None
    interface: str | None = None
    """Where to count bytes; None: thinwire counts its own, and those of DDP are computed."""
    predicted_rate: float | None = None
    """The budget is in seconds that steps would take on links with so many bits per second; None: that they take."""
    compute: float | None = None
    """Seconds of forward and backward for such predictions, from an earlier run; None: measure them."""

    @property
    def contender(self) -> Contender | None:
        """What takes AdamW's place; None for AdamW."""
        return None if self.optimizer is None else contender(self.optimizer, self.downlink)

    @property
    def label(self) -> str:
        """The name of the run in tables and pictures."""
        return "DDP + AdamW" if self.contender is None else f"thinwire ({self.contender.label})"

    @property
    def overlaps(self) -> bool:
        """Whether it sends while backward runs."""
        return self.contender is None or self.contender.overlaps

    def settings(self, steps: int) -> dict[str, Any]:
        """Arguments of the optimizer for a run of so many steps."""
        return adamw(steps) if self.contender is None else self.contender.whole_run(steps, self.seed)

    def prepare(self, model: nn.Module, steps: int) -> Prepared:
        """Give a model its optimizer, and what replaces DDP's averaging."""
        if self.contender is None:
            return Prepared(torch.optim.AdamW(model.parameters(), **self.settings(steps)), metrics=None)
        return self.contender.prepare(model, self.settings(steps))


@dataclass(frozen=True)
class TrainingProgress:
    """A sign of life from rank 0; ``seconds`` is the time spent in training steps so far, or predicted for them."""

    step: int
    share: float
    """Of the budget, 0 to 1."""
    loss: float
    seconds: float
    bytes_sent: float


@dataclass(frozen=True)
class StepSeconds:
    """Where the time of a step went: medians over the steps, then the mean over the workers.

    ``compute`` is forward and backward without any exchange, ``optimizer`` is ``optimizer.step()`` without its waiting.
    ``exchange`` is the rest of the step: what the exchange slows backward by, and what is waited for after it.
    """

    step: float
    compute: float
    exchange: float
    optimizer: float
    mean_step: float
    """The mean over the steps, on rank 0."""


@dataclass(frozen=True)
class TrainingResult:
    """What a run showed. The curves have one value per step; validation is pairs of (step, loss)."""

    label: str
    settings: dict[str, Any]
    ranks: int
    steps: int
    planned_steps: int
    """For which learning rates and stages were laid out."""
    parameters: int
    validation_loss: float
    bytes_sent_per_step: float
    bytes_sent_source: str
    seconds: StepSeconds
    training_losses: list[float]
    cumulative_seconds: list[float]
    """Of training steps on rank 0; predicted if there is a clock."""
    cumulative_bytes: list[float]
    validation_losses: list[tuple[int, float]]
    metrics: dict[str, Any] | None
    remark: str | None
    """Which steps send what, where they are not all alike."""
    overlaps: bool
    """Whether it sends while backward runs."""
    clock: PredictedClock | None

    @property
    def training_seconds(self) -> float:
        """Of all steps."""
        return self.cumulative_seconds[-1]


@dataclass
class _Record:
    """What one worker saw: an entry a step, in ``compute_alone`` a probe."""

    loss: list[float] = field(default_factory=list)
    bytes_sent: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    compute_alone: list[float] = field(default_factory=list)

    def typical_seconds(self) -> StepSeconds:
        """Agree with the other workers on the typical step."""
        ignored = min(WARM_UP_STEPS, len(self.step) // 2)
        step, optimizer = median(self.step[ignored:]), median(self.optimizer[ignored:])
        compute = median(self.compute_alone)
        typical = _mean_over_workers([step, compute, step - compute - optimizer, optimizer])
        return StepSeconds(*typical, mean_step=fmean(self.step))


class _Worker:
    """A model and its optimizer on one rank, in a run that is planned to have so many steps."""

    def __init__(self, config: TrainingConfig, corpus: Corpus, planned_steps: int) -> None:
        self._config, self._corpus = config, corpus
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(config.seed)
        self.model = DistributedDataParallel(CharTransformer(corpus.vocabulary_size, config.shape))
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.prepared = config.prepare(self.model, planned_steps)
        self.position = 0.0
        """In steps of the plan."""
        self._schedule = LambdaLR(self.prepared.optimizer, lambda _: learning_rate_factor(self.position, planned_steps))
        # One stream of windows for the whole group, of which a rank takes its row: the order depends on the seed alone.
        self._data_order = torch.Generator().manual_seed(config.seed)
        self.record = _Record()
        self._counter = None if config.interface is None else LinkCounter(config.interface)
        self._sent_before = 0 if self._counter is None else self._counter.bytes_sent()

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """The windows of this rank."""
        context = self._config.shape.context
        last_start = len(self._corpus.training) - context
        starts = torch.randint(last_start, (self._ranks, self._config.batch), generator=self._data_order)
        return self._corpus.training_batch(starts[self._rank], context)

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Take a step with the learning rate of the position."""
        optimizer, record = self.prepared.optimizer, self.record
        begin = time.perf_counter()
        loss = self.model(*batch)
        loss.backward()
        backward_done = time.perf_counter()
        waited_before = self._exposed_wait()
        optimizer.step()
        optimizer_done = time.perf_counter()
        optimizer.zero_grad()
        end = time.perf_counter()

        record.loss.append(loss.item())
        waited = self._exposed_wait() - waited_before
        record.optimizer.append(optimizer_done - backward_done - waited)
        record.step.append(end - begin)

    def move_to(self, position: float) -> None:
        """Set the learning rate for the next step. All ranks do so with the same position."""
        self.position = position
        self._schedule.step()

    def synchronize(self) -> None:
        """Where workers have local steps: give all of them the same model."""
        if isinstance(self.prepared.optimizer, WireOptimizer):
            self.prepared.optimizer.synchronize()

    def probe(self, batch: tuple[Tensor, Tensor]) -> None:
        """Time forward and backward while all workers compute and none sends; the gradients are thrown away."""
        dist.barrier()
        begin = time.perf_counter()
        with self.model.no_sync():
            self.model(*batch).backward()
        self.record.compute_alone.append(time.perf_counter() - begin)
        self.model.zero_grad()
        dist.barrier()

    def bytes_sent(self, steps: int) -> float:
        """Bytes this worker has sent in so many steps: counted, or for DDP what a ring all-reduce of fp32 must send."""
        if self._counter is not None:
            return self._counter.bytes_sent() - self._sent_before
        if self.prepared.metrics is not None:
            return self.prepared.metrics().bytes_sent
        return steps * 2 * (self._ranks - 1) / self._ranks * 4 * self.parameters

    @property
    def bytes_sent_source(self) -> str:
        """Where that number comes from."""
        if self._counter is not None:
            return "counted at the interface"
        return "counted" if self.prepared.metrics is not None else "theoretical"

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean loss over the validation windows. Every worker takes its share, so that none waits for another."""
        windows = self._corpus.validation_windows(self._config.shape.context, VALIDATION_WINDOWS)
        characters, targets = (part[self._rank :: self._ranks] for part in windows)
        total_and_count = torch.zeros(2, dtype=torch.float64)
        for first in range(0, len(characters), VALIDATION_BATCH):
            batch = slice(first, first + VALIDATION_BATCH)
            count = len(characters[batch])
            loss = self.model.module(characters[batch], targets[batch]).item()
            total_and_count += torch.tensor([loss * count, count], dtype=torch.float64)
        dist.all_reduce(total_and_count)
        return (total_and_count[0] / total_and_count[1]).item()

    def _exposed_wait(self) -> float:
        return 0.0 if self.prepared.metrics is None else self.prepared.metrics().exposed_wait_seconds

    def close(self) -> None:
        """Release the descriptor of the counter."""
        if self._counter is not None:
            self._counter.close()


def train(report: Report, config: TrainingConfig) -> TrainingResult:
    """Train as configured; rank 0 reports ``TrainingProgress`` now and then."""
    corpus = Corpus.from_text(config.text, config.shape.context)
    step_seconds, clock = _trial(config, corpus)
    planned_steps = config.budget.planned_steps(step_seconds)
    gc.collect()  # the model of the trial, whose threads and connections go with it
    worker = _Worker(config, corpus, planned_steps)
    record, budget = worker.record, config.budget
    elapsed, before, sent = 0.0, 0.0, 0.0
    seconds: list[float] = []
    validation_losses: list[tuple[int, float]] = []
    reported_at = -math.inf
    finished = False

    while not finished:
        batch = worker.next_batch()
        position = worker.position
        if not record.step or is_due(position, planned_steps, PROBES, before=before):
            worker.probe(batch)
        worker.step(batch)
        step = len(record.step)
        sent, sent_before = worker.bytes_sent(step), sent
        seconds.append(record.step[-1] if clock is None else clock.step_seconds(sent - sent_before))
        # Clocks differ; all workers have to agree on the learning rate, and on when it is over.
        elapsed = _said_by_rank_0(elapsed + seconds[-1])
        before, position = position, budget.position(planned_steps, step, elapsed)
        finished = budget.is_spent(step, elapsed)
        worker.move_to(position)
        validates = finished or is_due(position, planned_steps, EVALUATIONS, before=before)
        if validates:
            worker.synchronize()  # all workers validate, and so the same model
            dist.barrier()  # what others wait for has been sent, and is counted
            sent = worker.bytes_sent(step)
        record.bytes_sent.append(sent)
        if validates:
            validation_losses.append((step, worker.validation_loss()))
        if time.monotonic() - reported_at > SECONDS_BETWEEN_REPORTS or finished:
            reported_at = time.monotonic()
            share = 1.0 if finished else position / planned_steps
            report(TrainingProgress(step, share, record.loss[-1], elapsed, sent))

    worker.close()
    steps = len(record.step)
    sent_by_all = _mean_over_workers(record.bytes_sent)
    metrics = worker.prepared.metrics
    return TrainingResult(
        label=config.label,
        settings=config.settings(planned_steps),
        ranks=dist.get_world_size(),
        steps=steps,
        planned_steps=planned_steps,
        parameters=worker.parameters,
        validation_loss=validation_losses[-1][1],
        bytes_sent_per_step=sent_by_all[-1] / steps,
        bytes_sent_source=worker.bytes_sent_source,
        seconds=record.typical_seconds(),
        training_losses=_mean_over_workers(record.loss),
        cumulative_seconds=list(accumulate(seconds)),
        cumulative_bytes=sent_by_all,
        validation_losses=validation_losses,
        metrics=None if metrics is None else asdict(metrics()),
        remark=None if config.contender is None else config.contender.stages.remark(planned_steps),
        overlaps=config.overlaps,
        clock=clock,
    )


def _trial(config: TrainingConfig, corpus: Corpus) -> tuple[float, PredictedClock | None]:
    """Train for a few steps, to plan a run: returns the mean time of a step, and the clock if times are predicted.

    The trial has all stages of a run, so that slow ones have their share of the mean.
    """
    worker = _Worker(config, corpus, TRIAL_STEPS)
    record = worker.record
    limit = math.inf if config.budget.seconds is None else TRIAL_SHARE * config.budget.seconds
    batch = worker.next_batch()
    for _ in range(TRIAL_PROBES):
        worker.probe(batch)
    elapsed = 0.0
    for step in range(1, TRIAL_STEPS + 1):
        worker.step(batch)
        record.bytes_sent.append(worker.bytes_sent(step))
        elapsed = _said_by_rank_0(sum(record.step))
        if elapsed > limit and step >= SHORTEST_TRIAL:
            break
        worker.move_to(step)
    worker.close()
    # The first step also makes buckets and connections. The second is of the same stage.
    second = min(1, len(record.step) - 1)
    compute, optimizer = _mean_over_workers([median(record.compute_alone), median(record.optimizer[second:])])
    if config.predicted_rate is None:
        return _said_by_rank_0(fmean([record.step[second], *record.step[1:]])), None
    clock = PredictedClock(config.predicted_rate, config.compute or compute, optimizer, config.overlaps)
    sent = [after - before for before, after in pairwise([0.0, *record.bytes_sent])]
    return _said_by_rank_0(fmean(map(clock.step_seconds, sent))), clock


def _said_by_rank_0(value: float) -> float:
    told = torch.tensor(value, dtype=torch.float64)
    dist.broadcast(told, src=0)
    return told.item()


def _mean_over_workers(values: list[float]) -> list[float]:
    mean = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()

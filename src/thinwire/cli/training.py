"""One run of the demo: what every worker does, and what rank 0 reports of it."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from thinwire.cli.averagings import Contender, contender
from thinwire.cli.charlm import CharTransformer, Corpus, ModelShape
from thinwire.cli.launch import Report
from thinwire.cli.registry import ADAMW, Prepared
from thinwire.cli.schedule import is_due, learning_rate_factor
from thinwire.optimizers.optimizer import WireOptimizer

EVALUATIONS = 12
PROBES = 20
# The first steps build DDP's buckets, fault memory in and fill caches; they are not typical of the rest.
WARM_UP_STEPS = 10
VALIDATION_WINDOWS = 512
VALIDATION_BATCH = 32
SECONDS_BETWEEN_REPORTS = 0.1


@dataclass(frozen=True)
class TrainingConfig:
    """Everything that decides a run. ``optimizer`` is the name of a contender, or None for AdamW."""

    text: str
    shape: ModelShape
    batch: int
    steps: int
    seed: int
    optimizer: str | None
    downlink: str | None = None

    @property
    def contender(self) -> Contender | None:
        """What takes AdamW's place; None for AdamW."""
        return None if self.optimizer is None else contender(self.optimizer, self.downlink)

    @property
    def label(self) -> str:
        """The name of the run in tables and pictures."""
        return "DDP + AdamW" if self.contender is None else f"DDP + {self.contender.label}"

    def settings(self) -> dict[str, Any]:
        """Arguments of the optimizer."""
        return dict(ADAMW) if self.contender is None else self.contender.whole_run(self.steps, self.seed)

    def prepare(self, model: nn.Module) -> Prepared:
        """Give a model its optimizer, and what replaces DDP's averaging."""
        if self.contender is None:
            return Prepared(torch.optim.AdamW(model.parameters(), **self.settings()), metrics=None)
        return self.contender.prepare(model, self.settings())


@dataclass(frozen=True)
class TrainingProgress:
    """A sign of life from rank 0; ``seconds`` is the time spent in training steps so far."""

    step: int
    loss: float
    seconds: float


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


@dataclass(frozen=True)
class TrainingResult:
    """What a run showed. The curves have one value per step; validation is pairs of (step, loss)."""

    label: str
    settings: dict[str, Any]
    ranks: int
    steps: int
    parameters: int
    validation_loss: float
    bytes_sent_per_step: float
    seconds: StepSeconds
    training_losses: list[float]
    cumulative_seconds: list[float]
    cumulative_bytes: list[float]
    validation_losses: list[tuple[int, float]]
    metrics: dict[str, Any] | None
    remark: str | None
    """Which steps send what, where they are not all alike."""
    overlaps: bool
    """Whether it sends while backward runs."""


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
        return StepSeconds(*_mean_over_workers([step, compute, step - compute - optimizer, optimizer]))


def train(report: Report, config: TrainingConfig) -> TrainingResult:
    """Train as configured; rank 0 reports ``TrainingProgress`` now and then."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    corpus = Corpus.from_text(config.text, config.shape.context)
    seed, steps = config.seed, config.steps
    torch.manual_seed(seed)
    model = DistributedDataParallel(CharTransformer(corpus.vocabulary_size, config.shape))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    prepared = config.prepare(model)
    optimizer = prepared.optimizer
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))

    # One stream of windows for the whole group, of which a rank takes its row: the order depends on the seed alone.
    data_order = torch.Generator().manual_seed(seed)
    last_start = len(corpus.training) - config.shape.context
    record = _Record()
    validation_losses: list[tuple[int, float]] = []
    reported_at = -math.inf

    for step in range(1, steps + 1):
        starts = torch.randint(last_start, (ranks, config.batch), generator=data_order)[rank]
        batch = corpus.training_batch(starts, config.shape.context)
        if is_due(step, steps, PROBES):
            record.compute_alone.append(_compute_seconds(model, batch))
        _train_step(model, prepared, batch, record)
        schedule.step()
        validates = is_due(step, steps, EVALUATIONS)
        if validates and isinstance(optimizer, WireOptimizer):
            optimizer.synchronize()  # all workers validate, and so the same model
        record.bytes_sent.append(_bytes_sent(prepared, step, parameters, ranks))
        if time.monotonic() - reported_at > SECONDS_BETWEEN_REPORTS or step == steps:
            reported_at = time.monotonic()
            report(TrainingProgress(step, record.loss[-1], sum(record.step)))
        if validates:
            validation_losses.append((step, _validation_loss(model.module, corpus, config.shape.context)))

    return TrainingResult(
        label=config.label,
        settings=config.settings(),
        ranks=ranks,
        steps=steps,
        parameters=parameters,
        validation_loss=validation_losses[-1][1],
        bytes_sent_per_step=record.bytes_sent[-1] / steps,
        seconds=record.typical_seconds(),
        training_losses=_mean_over_workers(record.loss),
        cumulative_seconds=list(accumulate(record.step)),
        cumulative_bytes=record.bytes_sent,
        validation_losses=validation_losses,
        metrics=None if prepared.metrics is None else asdict(prepared.metrics()),
        remark=None if config.contender is None else config.contender.stages.remark(steps),
        overlaps=config.contender is None or config.contender.overlaps,
    )


def _train_step(
    model: DistributedDataParallel, prepared: Prepared, batch: tuple[Tensor, Tensor], record: _Record
) -> None:
    optimizer = prepared.optimizer
    begin = time.perf_counter()
    loss = model(*batch)
    loss.backward()
    backward_done = time.perf_counter()
    waited_before = _exposed_wait(prepared)
    optimizer.step()
    optimizer_done = time.perf_counter()
    optimizer.zero_grad()
    end = time.perf_counter()

    record.loss.append(loss.item())
    waited = _exposed_wait(prepared) - waited_before
    record.optimizer.append(optimizer_done - backward_done - waited)
    record.step.append(end - begin)


def _exposed_wait(prepared: Prepared) -> float:
    return 0.0 if prepared.metrics is None else prepared.metrics().exposed_wait_seconds


def _bytes_sent(prepared: Prepared, step: int, parameters: int, ranks: int) -> float:
    """Bytes this worker has sent so far: counted, or for DDP what a ring all-reduce of fp32 gradients must send."""
    if prepared.metrics is not None:
        return prepared.metrics().bytes_sent
    return step * 2 * (ranks - 1) / ranks * 4 * parameters


def _compute_seconds(model: DistributedDataParallel, batch: tuple[Tensor, Tensor]) -> float:
    """Time forward and backward while all workers compute and none sends; the gradients are thrown away."""
    dist.barrier()
    begin = time.perf_counter()
    with model.no_sync():
        model(*batch).backward()
    seconds = time.perf_counter() - begin
    model.zero_grad()
    dist.barrier()
    return seconds


@torch.no_grad()
def _validation_loss(model: nn.Module, corpus: Corpus, context: int) -> float:
    """Mean loss over the validation windows. Every worker takes its share, so that none waits for another."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    characters, targets = (part[rank::ranks] for part in corpus.validation_windows(context, VALIDATION_WINDOWS))
    total_and_count = torch.zeros(2, dtype=torch.float64)
    for first in range(0, len(characters), VALIDATION_BATCH):
        batch = slice(first, first + VALIDATION_BATCH)
        count = len(characters[batch])
        loss = model(characters[batch], targets[batch]).item()
        total_and_count += torch.tensor([loss * count, count], dtype=torch.float64)
    dist.all_reduce(total_and_count)
    return (total_and_count[0] / total_and_count[1]).item()


def _mean_over_workers(values: list[float]) -> list[float]:
    mean = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()

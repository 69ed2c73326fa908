"""What is trained in the study: tasks on real data, small enough for many runs on few cores."""

from __future__ import annotations

import abc
import functools
import hashlib
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from thinwire.cli.charlm import CharTransformer, Corpus, ModelShape, load_text
from thinwire.cli.schedule import learning_rate_factor
from thinwire.cli.study.images import FASHION_MNIST, PictureNet, read_pictures

WORKERS = 4
LAST_RATE = 0.1
"""The learning rate at the end of a run, beside the largest."""
WINDOWS, LAST_WINDOWS = 256, 1024
PICTURES = 1000
"""To look at on the way, and in the end: of pictures all of them."""
VALIDATION_BATCH = 64


@dataclass(frozen=True)
class Sources:
    """Where data is: a text (None for the one that comes with Python), and a directory of IDX files."""

    text: Path | None = None
    pictures: Path = FASHION_MNIST


@dataclass(frozen=True)
class Score:
    """What a model is worth on data that it has not seen."""

    loss: float
    accuracy: float | None = None


@dataclass(frozen=True)
class Task(abc.ABC):
    """A model, its data, and how long it is trained."""

    sources: Sources
    name: str
    title: str
    steps: int
    batch: int
    """Of one worker."""
    lr: float
    """What learning rates are multiples of: 1 for a transformer from scratch."""
    workers: int = field(default=WORKERS, kw_only=True)
    methods: tuple[str, ...] | None = field(default=None, kw_only=True)
    """The names of the methods that take part; None for all. A long task has few."""
    betas: tuple[float, ...] | None = field(default=None, kw_only=True)
    """The betas of a search that tries learning rates only, because runs are long. None: betas and decay too."""
    reference: Task | None = field(default=None, kw_only=True)
    """Another task with the same mean gradients, whose AdamW is compared with. None: this task has its own."""

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """A model whose forward(inputs, targets) is the loss; from torch's random numbers, or from a checkpoint."""

    @property
    @abc.abstractmethod
    def examples(self) -> int:
        """How many examples to train on there are."""

    @abc.abstractmethod
    def take(self, examples: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some of them."""

    @abc.abstractmethod
    def validate(self, model: nn.Module, *, last: bool) -> Score:
        """How good a model is; the last time more is looked at."""

    @abc.abstractmethod
    def data(self) -> str:
        """A fingerprint of the data."""

    def definition(self) -> dict[str, Any]:
        """What a run depends on beside the code, the optimizer and the data: results of another one are done again."""
        return {"steps": self.steps, "batch": self.batch, "workers": self.workers}

    def value(self, score: Score) -> float:
        """What is compared, less being better; infinite where training has diverged."""
        return score.loss if math.isfinite(score.loss) else math.inf


@dataclass(frozen=True)
class TextTask(Task):
    """Characters of a text, by a transformer, from scratch."""

    shape: ModelShape

    @property
    def corpus(self) -> Corpus:
        """What to train on, and what to validate on."""
        return _corpus(self.sources.text, self.shape.context)

    def definition(self) -> dict[str, Any]:
        """See `Task`."""
        return {**super().definition(), **asdict(self.shape)}

    def model(self) -> nn.Module:
        """See `Task`."""
        return CharTransformer(self.corpus.vocabulary_size, self.shape)

    @property
    def examples(self) -> int:
        """See `Task`."""
        return len(self.corpus.training) - self.shape.context

    def take(self, examples: Tensor) -> tuple[Tensor, Tensor]:
        """See `Task`."""
        return self.corpus.training_batch(examples, self.shape.context)

    def validate(self, model: nn.Module, *, last: bool) -> Score:
        """See `Task`."""
        windows = self.corpus.validation_windows(self.shape.context, LAST_WINDOWS if last else WINDOWS)
        assert isinstance(model, CharTransformer)
        parts = zip(*(part.split(VALIDATION_BATCH) for part in windows), strict=True)
        return Score(sum(model(*part).item() * len(part[0]) for part in parts) / len(windows[0]))

    def data(self) -> str:
        """See `Task`."""
        return _fingerprint(self.corpus.training, self.corpus.validation)


@dataclass(frozen=True)
class FineTuningTask(TextTask):
    """The second half of a text, for a model that AdamW has trained on the first."""

    pretraining_steps: int
    pretraining_lr: float

    @property
    def corpus(self) -> Corpus:
        """See `TextTask`."""
        return _halves(super().corpus)[1]

    def definition(self) -> dict[str, Any]:
        """See `Task`."""
        return {**super().definition(), "pretraining": [self.pretraining_steps, self.pretraining_lr]}

    def model(self) -> nn.Module:
        """See `Task`."""
        model = super().model()
        model.load_state_dict(_pretrained(self))
        return model


@functools.lru_cache(maxsize=1)
def _pretrained(task: FineTuningTask) -> dict[str, Tensor]:
    """Equal in all processes: it has a seed of its own, and does not change torch's random numbers."""
    corpus = _halves(_corpus(task.sources.text, task.shape.context))[0]
    steps, context = task.pretraining_steps, task.shape.context
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CharTransformer(corpus.vocabulary_size, task.shape)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=task.pretraining_lr, betas=(0.9, 0.99), weight_decay=0.1, fused=True
        )
        schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps, LAST_RATE))
        for _ in range(steps):
            starts = torch.randint(len(corpus.training) - context, (task.workers * task.batch,))
            model(*corpus.training_batch(starts, context)).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model.state_dict()


@functools.lru_cache(maxsize=2)
def _corpus(text: Path | None, context: int) -> Corpus:
    return Corpus.from_text(load_text(text), context)


def _halves(corpus: Corpus) -> tuple[Corpus, Corpus]:
    first, second = corpus.training.tensor_split(2)
    return replace(corpus, training=first), replace(corpus, training=second)


@dataclass(frozen=True)
class PictureTask(Task):
    """Kinds of small pictures, by a convolutional net."""

    def value(self, score: Score) -> float:
        """See `Task`: the share of pictures that are taken for something else."""
        return math.inf if score.accuracy is None else 1.0 - score.accuracy

    def model(self) -> nn.Module:
        """See `Task`."""
        return PictureNet()

    @property
    def examples(self) -> int:
        """See `Task`."""
        return len(_pictures(self.sources.pictures, "train")[0])

    def take(self, examples: Tensor) -> tuple[Tensor, Tensor]:
        """See `Task`."""
        pictures, labels = _pictures(self.sources.pictures, "train")
        return pictures[examples], labels[examples]

    def validate(self, model: nn.Module, *, last: bool) -> Score:
        """See `Task`."""
        pictures, labels = (part[: None if last else PICTURES] for part in _pictures(self.sources.pictures, "t10k"))
        assert isinstance(model, PictureNet)
        logits = torch.cat([model.logits(part) for part in pictures.split(VALIDATION_BATCH)])
        loss = nn.functional.cross_entropy(logits, labels)
        return Score(loss.item(), (logits.argmax(1) == labels).double().mean().item())

    def data(self) -> str:
        """See `Task`."""
        return _fingerprint(*_pictures(self.sources.pictures, "train"), *_pictures(self.sources.pictures, "t10k"))


@functools.lru_cache(maxsize=2)
def _pictures(directory: Path, part: str) -> tuple[Tensor, Tensor]:
    return read_pictures(directory, part)


def _fingerprint(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


SHAPE = ModelShape(layers=2, width=64, context=32)
_AVERAGED = ("compress-int8", "compress-int4", "compress-int3", "compress-int2")
_TRANSFORMER_BETAS = (0.7, 0.95)
"""Those of AdamW that were the best for the small transformer."""


def _with_workers(task: TextTask, workers: int) -> Task:
    """A task whose examples are shared by more workers: as many tokens in as many steps, and more votes, each of a
    noisier gradient."""
    return replace(
        task,
        name=f"{task.name}-{workers}",
        title=f"{task.title}, {workers} workers",
        batch=task.workers * task.batch // workers,
        workers=workers,
        methods=("birder-bit", "birder-votes"),
        betas=_TRANSFORMER_BETAS,
        reference=task,
    )


def tasks(sources: Sources) -> dict[str, Task]:
    """All of them, by name."""
    text = TextTask(sources, "text", "character transformer", steps=600, batch=8, lr=1.0, shape=SHAPE)
    made: list[Task] = [
        text,
        PictureTask(sources, "pictures", "convolutional net", steps=470, batch=32, lr=0.5),
        FineTuningTask(
            sources,
            "fine-tuning",
            "fine-tuned transformer",
            steps=200,
            batch=8,
            lr=0.25,
            shape=SHAPE,
            pretraining_steps=800,
            pretraining_lr=5e-3,
        ),
        TextTask(
            sources,
            "demo",
            "the demo's transformer",
            steps=400,
            batch=8,
            lr=1.0,
            shape=ModelShape(),
            methods=("adamw", *_AVERAGED, "onebit-adam-4bit"),
            betas=_TRANSFORMER_BETAS,
        ),
        TextTask(
            sources,
            "larger",
            "larger transformer",
            steps=1500,
            batch=2,
            lr=0.2,
            shape=ModelShape(layers=3, width=384, context=32),
            methods=("adamw", "compress-int4", "onebit-adam-4bit"),
            betas=_TRANSFORMER_BETAS,
        ),
        TextTask(
            sources,
            "large-batch",
            "large batch",
            steps=150,
            batch=32,
            lr=1.0,
            shape=SHAPE,
            workers=16,
            methods=("adamw", "lamb", "onebit-lamb", "onebit-adam-4bit"),
            betas=_TRANSFORMER_BETAS,
        ),
        *(_with_workers(text, workers) for workers in (8, 16, 32)),
    ]
    return {task.name: task for task in made}

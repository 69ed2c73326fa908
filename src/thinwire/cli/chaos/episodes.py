"""What is trained: episodes, each with one subject, a small model, and data that depend on nothing but numbers."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.cli.chaos.subjects import Subject, subjects

_TOKENS, _CLASSES, _BATCH = 60, 40, 4
_NOT_FINITE = (float("nan"), float("inf"), -float("inf"))


@dataclass(frozen=True)
class Episode:
    """A run that is to end with the same bits, whatever happens to it."""

    number: int
    subject_name: str
    ranks: int
    ranks_a_node: int
    """More than one: hierarchical."""
    bucket_mb: float
    steps: int
    save_every: int
    seed: int

    @property
    def label(self) -> str:
        """For people to read."""
        nodes = "" if self.ranks_a_node == 1 else f", {self.ranks // self.ranks_a_node} x {self.ranks_a_node}"
        return f"{self.subject_name}{nodes}"

    @property
    def subject(self) -> Subject:
        """What trains."""
        return subjects()[self.subject_name]

    def model(self) -> Net:
        """The same on every rank."""
        torch.manual_seed(self.seed)
        return Net()

    def batch(self, rank: int, step: int) -> Batch:
        """What a rank learns from in a step."""
        draw = torch.Generator().manual_seed(self._number(rank, step))
        tokens = torch.randint(0, _TOKENS, (_BATCH,), generator=draw)
        targets = torch.randint(0, _CLASSES, (_BATCH,), generator=draw)
        detour = bool(torch.randint(0, 3, (), generator=draw) == 0)
        return Batch(tokens, targets, detour=detour or self.subject.uses_all)

    def poison(self, rank: int, step: int) -> tuple[str, float] | None:
        """The parameter whose gradient is not finite on this rank in this step, and what it is instead."""
        of_step = random.Random(self._number(-1, step))
        if of_step.random() > 0.06 or rank not in of_step.sample(range(self.ranks), of_step.randint(1, 2)):
            return None
        of_rank = random.Random(self._number(-2 - rank, step))
        return of_rank.choice(Net.ALWAYS_USED), of_rank.choice(_NOT_FINITE)

    def _number(self, *parts: int) -> int:
        # Not hash(), which another version of Python may compute otherwise.
        text = ",".join(map(str, (self.seed, *parts)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


@dataclass(frozen=True)
class Batch:
    """A rank's data of one step."""

    tokens: Tensor
    targets: Tensor
    detour: bool
    """Whether the model goes through a layer that otherwise has no gradient."""


class Net(nn.Module):
    """Rows without a gradient, odd sizes, a 0-dim parameter, a layer that is used now and then; 25,000 elements."""

    ALWAYS_USED = ("embedding.weight", "wide.weight", "deep.bias", "scale", "head.weight")

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, 31)
        self.wide = nn.Linear(31, 160)
        self.deep = nn.Linear(160, 65)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.detour = nn.Linear(65, 65)
        self.head = nn.Linear(65, _CLASSES)

    def forward(self, batch: Batch) -> Tensor:
        """The loss."""
        hidden = torch.tanh(self.deep(torch.tanh(self.wide(self.embedding(batch.tokens))))) * self.scale
        if batch.detour:
            hidden = hidden + torch.tanh(self.detour(hidden))
        return nn.functional.cross_entropy(self.head(hidden), batch.targets)


def episodes(seed: int, ranks: int) -> Iterator[Episode]:
    """All subjects in turn, without end; each runs in nodes in one of three cycles, if it and the ranks allow it."""
    number = 0
    for cycle in itertools.count():
        for position, (name, subject) in enumerate(subjects().items()):
            draw = random.Random(f"{seed} {number}")
            in_nodes = ranks >= 4 and ranks % 2 == 0 and (position + cycle) % 3 == 2
            yield Episode(
                number=number,
                subject_name=name,
                ranks=ranks,
                ranks_a_node=2 if in_nodes and subject.runs_in_nodes else 1,
                bucket_mb=draw.choice((0.01, 0.02, 0.05)),
                steps=draw.randint(50, 90) * subject.pace,
                save_every=draw.randint(4, 9) * subject.pace,
                seed=draw.randrange(1 << 32),
            )
            number += 1

"""What is trained: episodes, each with one optimizer, a small model, and data that depend on nothing but numbers."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.cli.registry import OPTIMIZERS, offered
from thinwire.optimizers.optimizer import WireOptimizer

_LR = 1e-3
_REPLICA_CHECK = 7
"""Steps between checks of the replicas: often, and seldom together with a checkpoint."""

_TOKENS, _CLASSES, _BATCH = 60, 40, 4
_NOT_FINITE = (float("nan"), float("inf"), -float("inf"))


@dataclass(frozen=True)
class Episode:
    """A run that is to end with the same bits, whatever happens to it."""

    number: int
    optimizer_name: str
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
        return f"{self.optimizer_name}{nodes}"

    @property
    def has_local_steps(self) -> bool:
        """Whether nodes take steps of which others know nothing."""
        return OPTIMIZERS[self.optimizer_name].stages.has_local_steps

    def model(self) -> Net:
        """The same on every rank."""
        torch.manual_seed(self.seed)
        return Net()

    def optimizer(self, model: nn.Module) -> WireOptimizer:
        """Of all parameters of a model."""
        entry = OPTIMIZERS[self.optimizer_name]
        # All stages come long before the last step, however often the run restarts.
        settings = {"lr": _LR, **entry.options, **entry.stages.fifty_steps}
        every = {"bucket_mb": self.bucket_mb, "check_replicas_every": _REPLICA_CHECK}
        return entry.build(model.parameters(), {**settings, **every})

    def batch(self, rank: int, step: int) -> Batch:
        """What a rank learns from in a step."""
        draw = torch.Generator().manual_seed(self._number(rank, step))
        tokens = torch.randint(0, _TOKENS, (_BATCH,), generator=draw)
        targets = torch.randint(0, _CLASSES, (_BATCH,), generator=draw)
        return Batch(tokens, targets, detour=bool(torch.randint(0, 3, (), generator=draw) == 0))

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
    """All optimizers in turn, without end; each runs in nodes in one of three cycles, if the ranks allow it."""
    number = 0
    for cycle in itertools.count():
        for position, name in enumerate(offered("chaos")):
            draw = random.Random(f"{seed} {number}")
            in_nodes = ranks >= 4 and ranks % 2 == 0 and (position + cycle) % 3 == 2
            yield Episode(
                number=number,
                optimizer_name=name,
                ranks=ranks,
                ranks_a_node=2 if in_nodes else 1,
                bucket_mb=draw.choice((0.01, 0.02, 0.05)),
                steps=draw.randint(50, 90),
                save_every=draw.randint(4, 9),
                seed=draw.randrange(1 << 32),
            )
            number += 1

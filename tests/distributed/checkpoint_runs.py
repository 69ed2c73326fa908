"""What the suites of checkpoints share: a run in which everything must be saved for it to go on as before."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.common import digest
from tests.distributed.stages import VARIANCE
from thinwire import checkpoint

ZERO_ONE: dict[str, Any] = {**VARIANCE, "lr": 0.01}


def listed(path: Path) -> list[str]:
    """What is in a directory of checkpoints, besides its lock."""
    return sorted(entry.name for entry in path.iterdir() if entry.name != ".lock")


@dataclass(frozen=True)
class Case:
    optimizer: Callable[..., Any] = thinwire.Birder
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    attach: bool = False
    load_before_attach: bool = False
    saved_at: int = 3
    steps: int = 4
    """How many are taken after that."""


class NoisyNet(nn.Module):
    """Dropout draws from torch's random state; the running mean is a buffer of each rank's own unless DDP is there."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 13)
        self.norm = nn.BatchNorm1d(13)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(13, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.embedding(tokens))))


class Run:
    """A model, its optimizer and a schedule; `seed` is what each rank's random numbers start from."""

    def __init__(self, case: Case, rank: int, seed: int = 7, *, loads: bool = False) -> None:
        torch.manual_seed(0)
        self.rank, self.case = rank, case
        self.net = NoisyNet().to(case.dtype)
        # Before anything is loaded: DDP gives every rank the model of rank 0.
        self.model = DistributedDataParallel(self.net) if case.attach else self.net
        self.optimizer = case.optimizer(self.net.parameters(), **{"lr": 0.02, **case.options})
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.9)
        self.step = 0
        self.attaches_later = loads and case.load_before_attach
        if not self.attaches_later:
            self.attach()
        torch.manual_seed(seed + rank)
        random.seed(seed + rank)

    def attach(self) -> None:
        if self.case.attach:
            thinwire.attach(self.model, self.optimizer)

    def train(self, steps: int) -> list[str]:
        digests = []
        for _ in range(steps):
            tokens = torch.randint(0, 10 + random.randrange(5), (16,))
            self.loss(tokens).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.step += 1
            digests.append(self.now())
        return digests

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens).float().square().mean()

    def now(self) -> str:
        tensors = [*self.net.state_dict().values()]
        if not self.case.options.get("delay"):  # otherwise lanes may be writing to the state
            for p in self.net.parameters():
                tensors += [value for _, value in sorted(self.optimizer.state[p].items())]
        return digest(tensors)

    def state(self) -> str:
        states = self.optimizer._state_of_this_rank()["state"]  # waits for the exchange in flight
        return digest(value for of_one in states.values() for _, value in sorted(of_one.items()))

    def replica(self) -> str:
        return digest(self.net.parameters())

    def save(self, path: Path, **options: Any) -> Path:
        extra = {"schedule": self.schedule.state_dict(), "rank": self.rank}
        return checkpoint.save(path, self.model, self.optimizer, self.step, extra=extra, **options)

    def load(self, path: Path, **options: Any) -> checkpoint.Checkpoint | None:
        found = checkpoint.load(path, self.model, self.optimizer, **options)
        if found is not None:
            self.schedule.load_state_dict(found.extra["schedule"])
            self.step = found.step
        if self.attaches_later:
            self.attach()
        return found

"""What the suites of one process share: a run in which everything must be saved, and two checkpoints of one."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

import thinwire
from thinwire import checkpoint

FILES = ["manifest.json", "model.pt", "rank-00000.pt"]


class Run:
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1))
        self.optimizer = thinwire.Birder(self.net.parameters(), lr=0.01, seed=1)
        self.step = 0

    def train(self, steps: int = 1) -> Run:
        for _ in range(steps):
            self.step += 1
            # The batch is drawn as well, so that a random state that is not restored shows.
            self.net(torch.randn(8, 7) * random.random()).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def now(self) -> list[Any]:
        state = [value.clone() for p in self.net.parameters() for value in self.optimizer.state[p].values()]
        return [*(value.clone() for value in self.net.state_dict().values()), *state]

    def save(self, path: Path, **options: Any) -> Path:
        return checkpoint.save(path, self.net, self.optimizer, self.step, **options)

    def load(self, path: Path, **options: Any) -> checkpoint.Checkpoint | None:
        return checkpoint.load(path, self.net, self.optimizer, **options)


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def listed(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.name != ".lock")


Saved = tuple[Path, list[Any], list[Any]]
"""A directory with checkpoints of steps 2 and 3, and what there was to save."""


def save_two(path: Path) -> Saved:
    run = Run().train(2)
    run.save(path)
    before = run.now()
    run.train().save(path)
    return path, before, run.now()


def copied(saved: Saved, path: Path) -> Saved:
    """For a test to spoil."""
    return shutil.copytree(saved[0], path), *saved[1:]

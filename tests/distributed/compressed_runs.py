"""What the suites of checkpoints share about `thinwire.compress`: a run with any optimizer, in which everything must be
saved for it to continue as before."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.checkpoint_runs import NoisyNet
from tests.distributed.common import digest
from tests.saved_states import of_one_rank
from thinwire import checkpoint

BUCKET_MB = 0.0005
"""131 elements, so that the network has several buckets."""
DDP_BUCKET_MB = 0.0001
"""After the first step, when DDP makes new buckets, each layer has its own."""


@dataclass(frozen=True)
class Case:
    compressor: str = "int4"
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the optimizer."""
    dtype: torch.dtype = torch.float32
    scaled: bool = False
    """Whether there is a GradScaler, whose scale doubles every second step."""


class Run:
    """A model in DDP, its compression, its optimizer and a schedule; `seed` is what random numbers start from."""

    def __init__(self, case: Case, rank: int, seed: int = 7) -> None:
        torch.manual_seed(0)
        self.rank, self.case, self.step = rank, case, 0
        self.net = NoisyNet().to(case.dtype)
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=DDP_BUCKET_MB)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=case.scaled)
        options = {"bucket_mb": BUCKET_MB, "grad_scaler": self.scaler, **case.options}
        self.compression = thinwire.compress(self.model, case.compressor, **options)
        self.optimizer = case.optimizer(self.net.parameters(), **{"lr": 0.02, **case.settings})
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.9)
        torch.manual_seed(seed + rank)
        random.seed(seed + rank)

    def train(self, steps: int) -> list[str]:
        """The digests of everything, after each step."""
        digests = []
        for _ in range(steps):
            self.backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.step += 1
            digests.append(self.now())
        return digests

    def backward(self) -> None:
        tokens = torch.randint(0, 10 + random.randrange(5), (16,))
        self.scaler.scale(self.model(tokens).float().square().mean()).backward()

    def states(self) -> list[torch.Tensor]:
        """Those of the optimizer and of the compression."""
        of_both = (self.optimizer.state_dict(), of_one_rank(self.compression.state_dict()))
        entries = [entry for saved in of_both for of_one in saved["state"].values() for entry in sorted(of_one.items())]
        return [value for _, value in entries if isinstance(value, torch.Tensor)]

    def residuals(self) -> list[torch.Tensor]:
        """What the compression keeps for each parameter of this rank, besides numbers that all ranks share."""
        saved = of_one_rank(self.compression.state_dict())["state"]
        return [value for of_one in saved.values() for name, value in of_one.items() if name not in ("step", "q")]

    def now(self) -> str:
        return digest([*self.net.state_dict().values(), *self.states()])

    def replica(self) -> str:
        return digest(self.net.parameters())

    def save(self, path: Path, **options: Any) -> Path:
        extra = {"schedule": self.schedule.state_dict(), "scaler": self.scaler.state_dict(), "rank": self.rank}
        return checkpoint.save(
            path, self.model, self.optimizer, self.step, extra=extra, compression=self.compression, **options
        )

    def load(self, path: Path, **options: Any) -> checkpoint.Checkpoint | None:
        found = checkpoint.load(path, self.model, self.optimizer, compression=self.compression, **options)
        if found is not None:
            self.schedule.load_state_dict(found.extra["schedule"])
            self.scaler.load_state_dict(found.extra["scaler"])
            self.step = found.step
        return found

"""Stop and go on as if nothing had happened: every rank saves and loads a checkpoint of its own.

torchrun --nproc-per-node 2 examples/resume.py --directory checkpoints
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire


class Run:
    """A training run from scratch, or from a checkpoint."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(0)
        self.model = DDP(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)))
        self.optimizer = thinwire.Birder(self.model.parameters(), lr=2e-3)
        thinwire.attach(self.model, self.optimizer)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=steps)
        self.step = 0

    def train(self, until: int) -> float:
        """Go on to step `until`; returns the last loss."""
        loss = torch.tensor(float("nan"))
        while self.step < until:
            x, y = batch(self.step)
            loss = nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.step += 1
        return loss.item()

    def save(self, directory: Path) -> None:
        """Write this rank's checkpoint."""
        # m and b are averages of this rank's own gradients, so rank 0 cannot save for all. No random state is needed:
        # the optimizer's draws are a function of seed, step, rank and element.
        directory.mkdir(parents=True, exist_ok=True)
        checkpoint = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "step": self.step,
        }
        path = checkpoint_path(directory)
        # A crash while writing leaves the last good checkpoint in place.
        torch.save(checkpoint, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)

    def load(self, directory: Path) -> None:
        """Read this rank's checkpoint. Another number of ranks, or another optimizer, is refused."""
        checkpoint = torch.load(checkpoint_path(directory), weights_only=True)
        self.model.module.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.schedule.load_state_dict(checkpoint["schedule"])
        self.step = checkpoint["step"]


def checkpoint_path(directory: Path) -> Path:
    """Where this rank keeps its checkpoint."""
    return directory / f"rank{dist.get_rank()}of{dist.get_world_size()}.pt"


def batch(step: int) -> tuple[Tensor, Tensor]:
    """This rank's batch of a step: a function of the step, so that a resumed run sees the same data."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    x = torch.randn(64, 16, generator=generator)
    return x, x[:, :4].prod(dim=1, keepdim=True) + x[:, 4:5]


def main() -> None:
    """Train without a stop and with one, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")

    straight = Run(arguments.steps)
    loss = straight.train(arguments.steps)

    first = Run(arguments.steps)
    first.train(arguments.steps // 2)
    first.save(arguments.directory)

    second = Run(arguments.steps)
    second.load(arguments.directory)
    resumed_loss = second.train(arguments.steps)

    pairs = zip(straight.model.parameters(), second.model.parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    print(f"rank {dist.get_rank()}: loss {loss:.4f} without a stop, {resumed_loss:.4f} with; same parameters: {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

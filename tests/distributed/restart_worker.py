"""A worker as users write them for `torchrun --max-restarts`, which kills itself now and then.

torchrun --standalone --nproc-per-node 3 --max-restarts 6 tests/distributed/restart_worker.py DIRECTORY 6

The environment needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: see `thinwire.checkpoint`.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import checkpoint

STEPS = 90
SAVE_EVERY = 2
LONGEST_LIFE = 12
"""So many steps a life at most: less than a seventh of all."""
MOMENT = 0.04
"""Seconds within which death comes then: about as long as it takes to save."""


def train(rank: int, world_size: int, directory: Path, watch: Callable[[int], object]) -> tuple[str, int]:
    """A digest of the parameters after the last step, and the step from which this process has gone on.

    `watch` is told how many steps it has taken so far, and -1 before it loads.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 40), nn.Dropout(0.2), nn.GELU(), nn.Linear(40, 3)))
    optimizer = thinwire.Birder(model.parameters(), lr=0.01)
    thinwire.attach(model, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    torch.manual_seed(rank)
    watch(-1)
    found = checkpoint.load(directory, model, optimizer)
    start = 0
    if found is not None:
        start = found.step
        schedule.load_state_dict(found.extra["schedule"])
    for step in range(start, STEPS):
        watch(step - start)
        # Drawn from the random state of the process, which a checkpoint must bring back.
        model(torch.randn(8, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % SAVE_EVERY == 0:
            checkpoint.save(directory, model, optimizer, step + 1, extra={"schedule": schedule.state_dict()})
    accumulated = hashlib.sha256()
    for p in model.parameters():
        accumulated.update(p.detach().numpy().tobytes())
    return accumulated.hexdigest(), start


def main() -> None:
    """Train; in the first so many lives one rank is killed."""
    directory, kills = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    fate = random.Random(life)
    doomed = life < kills and dist.get_rank() == fate.randrange(dist.get_world_size())
    steps, moment = fate.randrange(-1, LONGEST_LIFE), fate.uniform(0.0, MOMENT)

    def watch(taken: int) -> None:
        if doomed and taken == steps:
            threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()

    digest, start = train(dist.get_rank(), dist.get_world_size(), directory / "checkpoints", watch)
    with open(directory / f"lives-{dist.get_rank()}", "a") as lives:
        lives.write(json.dumps({"life": life, "start": start, "digest": digest}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

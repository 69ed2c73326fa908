"""Save checkpoints, and resume from the last one after a crash, with the same result to the bit.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # or restarted workers may try to connect to dead ones
torchrun --nproc-per-node 2 --max-restarts 3 examples/resume.py --directory checkpoints --crash-at 130

A worker kills itself at step 130, once. torchrun restarts all workers. They load the checkpoint of step 100 and end
with the parameters of a run without a crash. Use a new directory for each run: a run resumes from the checkpoints that
it finds.
"""

import argparse
import hashlib
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire import checkpoint


def main() -> None:
    """Train to the end, from the last checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--crash-at", type=int, help="the step at which a worker kills itself, once")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")

    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1)))
    optimizer = thinwire.Birder(model.parameters(), lr=2e-3)
    thinwire.attach(model, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.steps)
    torch.manual_seed(dist.get_rank())  # for dropout; checkpoints contain the random states

    start = 0
    # All ranks call load, and each restores its own optimizer state.
    found = checkpoint.load(arguments.directory, model, optimizer)
    if found is not None:
        start = found.step
        schedule.load_state_dict(found.extra["schedule"])
    log(f"from step {start}")

    loss = torch.tensor(float("nan"))
    for step in range(start, arguments.steps):
        if step == arguments.crash_at and first_start() and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % arguments.save_every == 0:
            extra = {"schedule": schedule.state_dict()}
            path = checkpoint.save(arguments.directory, model, optimizer, step + 1, extra=extra, keep=2)
            log(f"saved {path}")

    log(f"step {arguments.steps}  loss {loss.item():.4f}  parameters {fingerprint(model)}")
    dist.destroy_process_group()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """This rank's batch of a step: a function of the step, so that a resumed run sees the same data."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    x = torch.randn(64, 16, generator=generator)
    return x, x[:, :4].prod(dim=1, keepdim=True) + x[:, 4:5]


def first_start() -> bool:
    """Whether torchrun has not restarted the workers yet."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def fingerprint(model: nn.Module) -> str:
    """A hash of all parameters."""
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def log(line: str) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()

"""Birder without DDP: `step()` exchanges by itself. Right for models that DDP does not fit, and for one process.

torchrun --nproc-per-node 2 examples/without_ddp.py
python examples/without_ddp.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire

BATCH, ACCUMULATED = 64, 2


def points(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy samples of a curve."""
    x = torch.rand(BATCH, 1, generator=generator) * 4 - 2
    return x, torch.sin(3 * x) + 0.05 * torch.randn(BATCH, 1, generator=generator)


def same_everywhere(model: nn.Module) -> bool:
    """Whether all ranks hold the same parameters, to the bit."""
    mine = nn.utils.parameters_to_vector(model.parameters()).detach().view(torch.int32)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return all(torch.equal(mine, other) for other in everyones)


def main() -> None:
    """Fit the curve, then compare the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps

    if dist.is_torchelastic_launched():  # by torchrun; otherwise this process is the only worker
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0

    # DDP would broadcast the weights of rank 0. Here it is up to us that all ranks start from the same ones: thinwire
    # sends steps, never weights.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    opt = thinwire.Birder(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=steps)
    generator = torch.Generator().manual_seed(1 + rank)

    for step in range(steps):
        total = 0.0
        for _ in range(ACCUMULATED):  # nothing is sent before step(), so gradients accumulate as in one process
            x, y = points(generator)
            loss = nn.functional.mse_loss(model(x), y) / ACCUMULATED
            loss.backward()
            total += loss.item()
        opt.step()
        opt.zero_grad()
        schedule.step()
        if rank == 0 and (step % 100 == 0 or step == steps - 1):
            print(f"step {step:4d}  loss {total:.4f}")

    if dist.is_initialized():
        same = same_everywhere(model)
        if rank == 0:
            print(f"the same parameters on all ranks, to the bit: {same}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

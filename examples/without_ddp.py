"""Birder without DDP: `step()` exchanges by itself. For models that DDP does not support, and for one process.

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


def equal_on_all_ranks(model: nn.Module) -> bool:
    """Whether all ranks hold the same parameters, to the bit."""
    own = nn.utils.parameters_to_vector(model.parameters()).detach().view(torch.int32)
    all_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, own)
    return all(torch.equal(own, other) for other in all_ranks)


def main() -> None:
    """Fit the curve, then compare the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps

    if dist.is_torchelastic_launched():  # by torchrun; otherwise this process is the only worker
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0

    # DDP would broadcast the weights of rank 0. Without it all ranks must start from the same weights, because thinwire
    # never sends weights.
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
        equal = equal_on_all_ranks(model)
        if rank == 0:
            print(f"parameters are equal on all ranks, to the bit: {equal}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

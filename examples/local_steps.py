"""Train each rank alone for 20 steps at a time, and exchange how far it has moved at 4 bits per parameter:

    torchrun --nproc-per-node 2 examples/local_steps.py

For links of 10 to 500 Mbit/s, between sites or over the internet.
"""

import torch
import torch.distributed as dist
from torch import nn

import thinwire

STEPS, EVERY, BATCH = 240, 20, 64


def network() -> nn.Module:
    """The model."""
    return nn.Sequential(nn.Linear(32, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Linear(256, 10))


def batch(teacher: nn.Module, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples, and the answers of a teacher."""
    x = torch.randn(BATCH, 32, generator=draw)
    with torch.no_grad():
        return x, teacher(x).argmax(dim=1)


def main() -> None:
    """Train, and compare what the ranks have."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same model and teacher on every rank
    teacher, model = nn.Linear(32, 10), network()
    draw = torch.Generator().manual_seed(rank)  # and other examples on each

    # The module itself, not in DistributedDataParallel: gradients stay where they are.
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    opt = thinwire.LocalSteps(inner, every=EVERY, compressor="int4")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)  # counts inner steps

    for step in range(1, STEPS + 1):
        x, y = batch(teacher, draw)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        schedule.step()
        if rank == 0 and (step == 1 or step % 60 == 0):
            print(f"step {step:3}  loss {loss.item():.3f}")

    # After a multiple of EVERY steps, all ranks have the same parameters. This averages the statistics of BatchNorm.
    opt.synchronize(model)
    model.eval()
    x, y = batch(teacher, torch.Generator().manual_seed(99))
    right = (model(x).argmax(dim=1) == y).float().mean().item()
    answers = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(answers, torch.tensor([right]))
    if rank == 0:
        metrics = opt.metrics()
        elements = sum(p.numel() for p in model.parameters())
        print(f"{right:.0%} right; the same on all ranks: {all(answer == answers[0] for answer in answers)}")
        print(
            f"{metrics.exchanges} exchanges, cosine to the average {metrics.cosine:.2f}. Sent per step and rank: "
            f"{metrics.bytes_sent_per_step:,.0f} bytes, DDP {4 * elements:,}"
        )
    opt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

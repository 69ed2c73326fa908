"""What `clip_norm` does against spikes, and what clipping costs.

python -m benchmarks.clipping

Spikes: a regression on two ranks, in which gradients are 10,000 times too large in every twentieth step of 200. The
table has the mean loss of the last 15 steps. `clip_grad_norm_` works with `overlap=False` only.

Cost: the time in which Birder encodes 24 gradients of a million elements each, relative to the same without clipping.
"""

from __future__ import annotations

from statistics import mean, median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.cli.launch import Report, run_local_ranks

STEPS = 200
LIMIT = 0.5
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "OneBitAdam": (thinwire.OneBitAdam, {"lr": 0.02, "betas": (0.9, 0.9), "warmup_steps": 30}),
    "Birder": (thinwire.Birder, {"lr": 0.01}),
}
WAYS = ("no spikes", "no clipping", f"clip_norm={LIMIT}", f"clip_grad_norm_({LIMIT}), overlap=False")
CLIPPING: dict[str, dict[str, float]] = {"none": {}, "clip_norm": {"clip_norm": 1e9}, "clip_value": {"clip_value": 1e9}}


def regress(name: str, way: str) -> float:
    """The loss at the end of one regression, on this rank."""
    make, options = OPTIMIZERS[name]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    teacher = nn.Linear(16, 4)
    model = DistributedDataParallel(net)
    clip = {"clip_norm": LIMIT} if way == WAYS[2] else {}
    optimizer = make(net.parameters(), weight_decay=0.0, **options, **clip)  # type: ignore[call-arg]
    assert isinstance(optimizer, (thinwire.OneBitAdam, thinwire.Birder))
    thinwire.attach(model, optimizer, overlap=way != WAYS[3])
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = options["lr"] * (1 - step / STEPS)
        x = torch.randn(32, 16, generator=generator)
        loss = nn.functional.mse_loss(model(x), teacher(x).detach())
        losses.append(loss.item())
        spike = step % 20 == 10 and way != WAYS[0]
        (loss * (1e4 if spike else 1)).backward()
        if way == WAYS[3]:
            nn.utils.clip_grad_norm_(net.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()
    return mean(losses[-15:])


def encode_seconds(clip: dict[str, float]) -> float:
    """The median time in which this rank encodes its gradients, and clips them."""
    torch.manual_seed(torch.distributed.get_rank())
    params = [nn.Parameter(torch.zeros(1 << 20)) for _ in range(24)]
    optimizer = thinwire.Birder(params, lr=1e-6, **clip)  # type: ignore[arg-type]
    for p in params:
        p.grad = torch.randn_like(p)
    times = []
    for _ in range(11):
        before = optimizer.metrics()
        optimizer.step()
        after = optimizer.metrics()
        encoding = after.encode_seconds - before.encode_seconds
        times.append(encoding + after.stage_seconds - before.stage_seconds)
    return median(times[2:])


def measure(report: Report) -> tuple[dict[tuple[str, str], float], dict[str, float]]:
    """All numbers, on one rank."""
    torch.set_num_threads(1)
    losses = {(name, way): regress(name, way) for name in OPTIMIZERS for way in WAYS}
    seconds = {name: encode_seconds(clip) for name, clip in CLIPPING.items()}
    return losses, {name: value / seconds["none"] for name, value in seconds.items()}


def main() -> None:
    """Print both tables."""
    losses, costs = run_local_ranks(measure, 2, (), lambda _: None)
    spikes = Table("loss", *WAYS, title="Spikes")
    for name in OPTIMIZERS:
        spikes.add_row(name, *(f"{losses[name, way]:.2g}" for way in WAYS))
    cost = Table("time to encode, none = 1", *CLIPPING, title="Cost")
    cost.add_row("Birder", *(f"{costs[name]:.2f}" for name in CLIPPING))
    console = Console()
    console.print(spikes)
    console.print(cost)


if __name__ == "__main__":
    main()

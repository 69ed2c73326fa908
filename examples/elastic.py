"""Train with workers that come and go. Start torchft's Lighthouse, and then as many workers as you like, anywhere:

    torchft_lighthouse --min_replicas 1
    TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/elastic.py

Kill one with Ctrl-C and the others go on; start another and it gets their parameters. On several machines each worker
needs a `hostname` under which the others reach it. Needs `pip install thinwire[elastic]`.
"""

import torch
from torch import nn

import thinwire.elastic

STEPS, EVERY, BATCH = 240, 20, 64


def main() -> None:
    """Train until the run has taken STEPS inner steps, while workers join and leave."""
    torch.manual_seed(0)
    teacher = nn.Linear(32, 10)
    torch.seed()  # other examples in each worker, and other initial values, which those of the run replace
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 10))

    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    opt = thinwire.elastic.ElasticLocalSteps(inner, every=EVERY, compressor="int4", hostname="localhost")
    opt.join()  # with the model on its device; torch.distributed is not needed
    print(f"joined {opt.workers - 1} others at step {opt.inner_steps}", flush=True)

    while opt.inner_steps < STEPS:
        # A learning rate as a function of the steps of the run: a worker that joins late has that of the others.
        inner.param_groups[0]["lr"] = 3e-3 * (1 - opt.inner_steps / STEPS)
        x = torch.randn(BATCH, 32)
        with torch.no_grad():
            y = teacher(x).argmax(dim=1)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if opt.inner_steps % EVERY == 0:
            print(f"step {opt.inner_steps:3}  loss {loss.item():.3f}  workers {opt.workers}", flush=True)
    print(f"sum of the parameters: {sum(p.double().sum().item() for p in model.parameters()):.12f}")
    opt.close()


if __name__ == "__main__":
    main()

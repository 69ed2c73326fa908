"""What many small tensors cost, over as many elements in few of them.

python -m benchmarks.many_tensors [--elements N,N] [--methods NAME,NAME] [--rounds N] [--json FILE]

Two virtual workers take steps with 20 tensors and with 1,000, which have as many elements together. Steps of the two
take turns, so that a noisy neighbour hits both alike. The table has the mean CPU time of a worker in a step,
its lanes included, and the ratio. Gradients are there before the step, which encodes, exchanges and applies.

birder                Birder
onebit_adam warm-up   the quantised steps of 1-bit Adam, at 4 bits
onebit_adam signs     its steps after the warm-up
int4                  the exchange of thinwire.compress(model, "int4"), without the user's optimizer
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import thinwire
from thinwire.averaging.averager import GradientAverager
from thinwire.averaging.catalogue import rule_of
from thinwire.transport.virtual import run_workers

WORKERS = 2
FEW, MANY = 20, 1000
WARM_UP_STEPS = 3
"""Steps before the ones that count. The first ones bring pages in, and end the warm-up of 1-bit Adam."""
Step = Callable[[], object]


@dataclass(frozen=True)
class Cost:
    """The CPU time of a step of one worker, in few tensors and in many."""

    method: str
    elements: int
    few_seconds: float
    many_seconds: float
    ratio: float
    """The median over rounds of the ratio of the two, which were measured one after the other."""
    microseconds_per_tensor: float
    """What a tensor costs beyond its elements."""


def _birder(params: Sequence[nn.Parameter]) -> Step:
    return thinwire.Birder(params, lr=1e-6).step


def _warm_up(params: Sequence[nn.Parameter]) -> Step:
    return thinwire.OneBitAdam(params, lr=1e-6, betas=(0.9, 0.9), warmup_steps=10**6).step


def _signs(params: Sequence[nn.Parameter]) -> Step:
    return thinwire.OneBitAdam(params, lr=1e-6, betas=(0.5, 0.5), warmup_steps=WARM_UP_STEPS - 1).step


def _int4(params: Sequence[nn.Parameter]) -> Step:
    averager = GradientAverager(params, rule_of("int4", {}))

    def average() -> None:
        averager.begin()
        for p in params:
            assert p.grad is not None
            averager.add(p, p.grad.view(-1))
        averager.finish()

    return average


METHODS: dict[str, Callable[[Sequence[nn.Parameter]], Step]] = {
    "birder": _birder,
    "onebit_adam warm-up": _warm_up,
    "onebit_adam signs": _signs,
    "int4": _int4,
}


def sizes(elements: int, tensors: int) -> list[int]:
    """The lengths of so many tensors with so many elements together: nearly equal, and no multiples of 64."""
    base = elements // tensors
    lengths = [base + (31 if i % 2 else -31) for i in range(tensors)]
    lengths[-1] += elements - sum(lengths)
    return lengths


def measure(method: str, elements: int, rounds: int) -> Cost:
    """Measure one method. Each virtual worker does the same."""
    of_workers = run_workers(WORKERS, _seconds, method, elements, rounds)
    # A message is copied by the worker that comes second, so only the sum over workers is the same in all rounds.
    few, many = (
        [sum(seconds) / WORKERS for seconds in zip(*side, strict=True)] for side in zip(*of_workers, strict=True)
    )
    ratio = median(of_many / of_few for of_few, of_many in zip(few, many, strict=True))
    few_seconds = median(few)
    per_tensor = (ratio - 1) * few_seconds / (MANY - FEW)
    return Cost(method, elements, few_seconds, median(many), ratio, per_tensor * 1e6)


def _seconds(worker: int, _: int, method: str, elements: int, rounds: int) -> tuple[list[float], list[float]]:
    torch.manual_seed(worker)
    steps = [METHODS[method](_parameters(sizes(elements, tensors))) for tensors in (FEW, MANY)]
    taken: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + WARM_UP_STEPS):
        for step, seconds in zip(steps, taken, strict=True):
            # Lanes of virtual workers run on the worker's own thread, so this is all the work and none of the waits.
            began = time.thread_time()
            step()
            if turn >= WARM_UP_STEPS:
                seconds.append(time.thread_time() - began)
    return taken


def _parameters(lengths: Sequence[int]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.ones(length)) for length in lengths]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def main() -> None:
    """Print the table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", default="10000000,25000000", help="numbers of elements, separated by commas")
    parser.add_argument("--methods", default=",".join(METHODS), help="names from the list above, separated by commas")
    parser.add_argument("--rounds", type=int, default=15, help="steps that count, of each kind")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    costs = [
        measure(method, int(elements), arguments.rounds)
        for elements in arguments.elements.split(",")
        for method in arguments.methods.split(",")
    ]
    table = Table("method", "elements", f"{FEW} tensors", f"{MANY:,} tensors", "ratio", "µs per tensor")
    for cost in costs:
        few, many = (f"{1e3 * seconds:.1f} ms" for seconds in (cost.few_seconds, cost.many_seconds))
        row = (cost.method, f"{cost.elements:,}", few, many, f"{cost.ratio:.3f}", f"{cost.microseconds_per_tensor:.2f}")
        table.add_row(*row)
    Console().print(table)
    if arguments.json is not None:
        report = {
            "benchmark": "many_tensors",
            "thinwire": thinwire.__version__,
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
            "settings": {"workers": WORKERS, "few": FEW, "many": MANY, "rounds": arguments.rounds},
            "results": [asdict(cost) for cost in costs],
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""A compressed step of thinwire.OneBitAdam against DeepSpeed's compressed all-reduce, on CPU with gloo.

pip install 'thinwire[bench]'
python benchmarks/against_deepspeed.py

Both live in the same processes and take turns, so that a noisy neighbour hits both alike. Where they are not alike:

* Ours is `step()` for one big gradient that is there already, encode to applied: momentum, compression with error
  feedback, exchange, and the move of the parameter. DeepSpeed's is `CompressedBackend.compressed_allreduce` of a
  momentum of that size, compression with error feedback and exchange only: ours does more.
* DeepSpeed's backend does not run on CPU and gloo as it is. Its packer of bits has "not been implemented on CPU
  backend": it gets one made of numpy.packbits and numpy.unpackbits, as fast as Python has them, and the table says how
  much of the time is that packer's. And gloo refuses to gather its scales, scalars into vectors of one element: they
  are sent as such vectors. All else is DeepSpeed's own code; its results are compared with the formula first.
* DeepSpeed makes many temporaries. malloc would give their pages back and fetch new ones at every call, so workers are
  started with settings of glibc's under which pages are used again. Without them DeepSpeed is slower.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import thinwire
from thinwire.cli.launch import Report, run_local_ranks
from thinwire.cli.stages import DENSE_STEPS, WARMED_UP
from thinwire.metrics import Stopwatch
from thinwire.testbed.supervisor import ChildError

VERSION = "0.19.6"
BAR = 4.0
UNTIMED_TURNS = 3
PAGE_REUSE = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}  # read when a process starts

OURS = "1-bit Adam, step()"
THEIRS = "DeepSpeed, all-reduce"
PACKER = "  in numpy's packbits"
DENSE = "fp32, all-reduce"

Seconds = dict[str, list[float]]


class NumpyPacker:
    """Takes the place of DeepSpeed's packer, and of the builder that it asks for one."""

    def __init__(self) -> None:
        self.watch = Stopwatch()

    def load(self) -> NumpyPacker:
        """What DeepSpeed asks of a builder."""
        return self

    def packbits(self, values: Tensor, _size: int, _rank: int) -> Tensor:
        """A bit for each float, the highest of a byte first: 0 where the sign is minus."""
        with self.watch:
            return torch.from_numpy(np.packbits(~np.signbit(values.numpy())))

    def unpackbits(self, packed: Tensor, _size: int, _rank: int) -> Tensor:
        """A float for each bit, 1 or -1."""
        with self.watch:
            signs = np.unpackbits(packed.numpy()).view(np.int8)
            signs += signs  # as bytes and in place, which is far cheaper than the same on floats
            signs -= 1
            return torch.from_numpy(signs).float()


def deepspeed_backend() -> Any:
    """Make a `CompressedBackend` that runs here."""
    # An operator for another kind of all-reduce, which DeepSpeed would otherwise compile now.
    import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    comm: Any = import_module("deepspeed.comm")
    comm.init_distributed(dist_backend="gloo", verbose=False)
    compressed: Any = import_module("deepspeed.runtime.comm.compressed")
    compressed.PackbitsBuilder = NumpyPacker
    all_gather = comm.all_gather
    comm.all_gather = lambda outputs, value, group: all_gather(outputs, value.view(outputs[0].shape), group=group)
    return compressed.CompressedBackend()


def error_memories(elements: int) -> tuple[Tensor, Tensor]:
    """For worker and server, as long as DeepSpeed's 1-bit Adam makes them."""
    multiple = (ranks := dist.get_world_size()) * math.lcm(ranks, 8)
    padded = math.ceil(elements / multiple) * multiple
    return torch.zeros(padded), torch.zeros(padded // ranks)


def check_results(backend: Any) -> None:
    """Compare what DeepSpeed's all-reduce gives with the formula, for momenta that every rank knows of all others."""
    ranks = dist.get_world_size()
    elements = 100 * ranks * math.lcm(ranks, 8)
    memories = error_memories(elements)
    worker_errors, server_errors = torch.zeros(ranks, elements), torch.zeros(ranks, elements // ranks)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):  # from the second on with what was not said before
        momenta = torch.randn(ranks, elements, generator=generator)
        result = backend.compressed_allreduce(momenta[dist.get_rank()].clone(), *memories, 0)
        said, worker_errors = scaled_signs(momenta + worker_errors)
        answer, server_errors = scaled_signs(said.mean(0).view(ranks, -1) + server_errors)
        torch.testing.assert_close(result, answer.flatten(), msg=lambda told: f"DeepSpeed's result is wrong: {told}")


def scaled_signs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """C(y) = ‖y‖₂/√len · sign(y) for each row, and y - C(y)."""
    scales = rows.norm(dim=1, keepdim=True) / math.sqrt(rows.shape[1])
    said = torch.where(rows >= 0, scales, -scales)
    return said, rows - said


def measure(report: Report, elements: int, repeats: int) -> Seconds:
    """Run on every rank."""
    backend = deepspeed_backend()
    check_results(backend)
    torch.manual_seed(dist.get_rank())
    parameter = nn.Parameter(torch.ones(elements))
    parameter.grad = gradient = torch.randn(elements)
    optimizer = thinwire.OneBitAdam([parameter], topology="flat", **WARMED_UP)
    for _ in range(DENSE_STEPS):
        optimizer.step()
    buffer, memories = torch.empty(elements), error_memories(elements)
    seconds: Seconds = {OURS: [], THEIRS: [], PACKER: [], DENSE: []}
    sides: dict[str, Callable[[], object]] = {
        OURS: optimizer.step,
        THEIRS: lambda: backend.compressed_allreduce(buffer, *memories, 0),
        DENSE: lambda: dist.all_reduce(buffer),
    }
    for turn in range(UNTIMED_TURNS + repeats):
        for name, run in sides.items():
            buffer.copy_(gradient)  # both all-reduces work in place
            packing = backend.packer.watch.seconds
            dist.barrier()
            began = time.perf_counter()
            run()
            dist.barrier()  # it is over when the slowest rank is through with it
            if turn >= UNTIMED_TURNS:
                seconds[name].append(time.perf_counter() - began)
                if name == THEIRS:
                    seconds[PACKER].append(backend.packer.watch.seconds - packing)
    return seconds


def print_results(ranks: int, elements: int, repeats: int, seconds: Seconds) -> None:
    """Print one table, and what one must know to read it."""
    table = Table(title=f"{elements:,} elements, {ranks} local ranks on loopback, medians of {repeats} turns")
    for column in ("", "ms", "quartiles", "ratio", "bar"):
        table.add_column(column, justify="right" if column else "left")
    ours = statistics.median(seconds[OURS])
    for name, taken in seconds.items():
        low, median, high = (f"{1e3 * quartile:.1f}" for quartile in statistics.quantiles(taken, n=4))
        ratio = statistics.median(taken) / ours
        bar = f"≥ {BAR:g} {'met' if ratio >= BAR else 'MISSED'}" if name == THEIRS else ""
        table.add_row(name, median, f"{low} to {high}", f"{ratio:.2f}", bar)
    Console().print(table)
    print(
        "Our time includes the momentum and the move of the parameter; those of the all-reduces do not.\n"
        f"DeepSpeed {VERSION} has no packer of bits for CPU, and was given numpy's. It agrees with the formula.\n"
        f"Workers reuse pages: {' '.join(f'{name}={value}' for name, value in PAGE_REUSE.items())}"
    )


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"ranks": 4, "elements": 25_000_000, "repeats": 11}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"two at least; {default:,} by default")
    plan = parser.parse_args()
    if min(vars(plan).values()) < 2:
        parser.error("expected two ranks, two elements and two repeats at least")
    # A version that was built from source may have a suffix.
    versions = [found.version.split("+")[0] for found in importlib.metadata.distributions(name="deepspeed")]
    if versions != [VERSION]:
        is_there = f"deepspeed {versions[0]} is" if versions else "deepspeed is not"
        sys.exit(f"{parser.prog}: {is_there} installed, {VERSION} is needed: pip install 'thinwire[bench]'")

    os.environ.update(PAGE_REUSE, DS_ACCELERATOR="cpu")  # for the ranks, which are new processes
    try:
        with Console(stderr=True).status("This takes a minute or two."):
            seconds: Seconds = run_local_ranks(measure, plan.ranks, (plan.elements, plan.repeats), print)
    except ChildError as error:
        sys.exit(f"{parser.prog}: {error}")
    print_results(plan.ranks, plan.elements, plan.repeats, seconds)


if __name__ == "__main__":
    main()

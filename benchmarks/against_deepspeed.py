"""A compressed step of thinwire.OneBitAdam against DeepSpeed's compressed all-reduce, on CPU with gloo.

pip install 'thinwire[bench]'
python benchmarks/against_deepspeed.py

Both run in the same processes and take turns, so that other load on the machine affects both equally. They differ in
these points:

* The time of thinwire is that of `step()` for one large gradient: momentum, compression with a residual, exchange, and
  the move of the parameter. The time of DeepSpeed is that of `CompressedBackend.compressed_allreduce` for a momentum of
  that size: compression with a residual and exchange only.
* DeepSpeed's backend does not run on CPU and gloo without changes. Its bit packer has "not been implemented on CPU
  backend". This script replaces it by numpy.packbits and numpy.unpackbits, the fastest in Python, and prints their part
  of the time. gloo cannot gather its scales, which are scalars, into vectors of one element; they are sent as vectors.
  Everything else is DeepSpeed's own code. Its results are compared with the formula first.
* DeepSpeed allocates many temporary tensors. By default malloc returns their pages to the system and requests new ones
  in every call. Workers run with glibc settings that reuse pages. Without these settings DeepSpeed is slower.
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
UNTIMED_TURNS = 3
PAGE_REUSE = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}  # read when a process starts

OURS = "1-bit Adam, step()"
THEIRS = "DeepSpeed, all-reduce"
PACKER = "  in numpy's packbits"
DENSE = "fp32, all-reduce"

Seconds = dict[str, list[float]]


class NumpyPacker:
    """Replaces DeepSpeed's bit packer, and the builder that DeepSpeed requests it from."""

    def __init__(self) -> None:
        self.watch = Stopwatch()

    def load(self) -> NumpyPacker:
        """The method of a builder that DeepSpeed calls."""
        return self

    def packbits(self, values: Tensor, _size: int, _rank: int) -> Tensor:
        """One bit per float, the highest of a byte first: 0 for a negative sign."""
        with self.watch:
            return torch.from_numpy(np.packbits(~np.signbit(values.numpy())))

    def unpackbits(self, packed: Tensor, _size: int, _rank: int) -> Tensor:
        """One float per bit, 1 or -1."""
        with self.watch:
            signs = np.unpackbits(packed.numpy()).view(np.int8)
            signs += signs  # as bytes and in place, which is far cheaper than the same on floats
            signs -= 1
            return torch.from_numpy(signs).float()


def deepspeed_backend() -> Any:
    """Make a `CompressedBackend` that runs on CPU and gloo."""
    # DeepSpeed would otherwise compile this operator now, which belongs to another all-reduce.
    import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    comm: Any = import_module("deepspeed.comm")
    comm.init_distributed(dist_backend="gloo", verbose=False)
    compressed: Any = import_module("deepspeed.runtime.comm.compressed")
    compressed.PackbitsBuilder = NumpyPacker
    all_gather = comm.all_gather
    comm.all_gather = lambda outputs, value, group: all_gather(outputs, value.view(outputs[0].shape), group=group)
    return compressed.CompressedBackend()


def residuals(elements: int) -> tuple[Tensor, Tensor]:
    """The residuals of worker and server, with the lengths of DeepSpeed's 1-bit Adam."""
    multiple = (ranks := dist.get_world_size()) * math.lcm(ranks, 8)
    padded = math.ceil(elements / multiple) * multiple
    return torch.zeros(padded), torch.zeros(padded // ranks)


def check_results(backend: Any) -> None:
    """Compare the result of DeepSpeed's all-reduce with the formula, for momenta that all ranks can compute."""
    ranks = dist.get_world_size()
    elements = 100 * ranks * math.lcm(ranks, 8)
    memories = residuals(elements)
    worker_errors, server_errors = torch.zeros(ranks, elements), torch.zeros(ranks, elements // ranks)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):  # from the second round on with residuals
        momenta = torch.randn(ranks, elements, generator=generator)
        result = backend.compressed_allreduce(momenta[dist.get_rank()].clone(), *memories, 0)
        sent, worker_errors = scaled_signs(momenta + worker_errors)
        answer, server_errors = scaled_signs(sent.mean(0).view(ranks, -1) + server_errors)
        torch.testing.assert_close(result, answer.flatten(), msg=lambda text: f"DeepSpeed is wrong: {text}")


def scaled_signs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """C(y) = ‖y‖₂/√len · sign(y) for each row, and y - C(y)."""
    scales = rows.norm(dim=1, keepdim=True) / math.sqrt(rows.shape[1])
    sent = torch.where(rows >= 0, scales, -scales)
    return sent, rows - sent


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
    buffer, memories = torch.empty(elements), residuals(elements)
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
            dist.barrier()  # the time is that of the slowest rank
            if turn >= UNTIMED_TURNS:
                seconds[name].append(time.perf_counter() - began)
                if name == THEIRS:
                    seconds[PACKER].append(backend.packer.watch.seconds - packing)
    return seconds


def print_results(ranks: int, elements: int, repeats: int, seconds: Seconds) -> None:
    """Print a table, and notes on how to read it."""
    table = Table(title=f"{elements:,} elements, {ranks} local ranks on loopback, medians of {repeats} turns")
    for column in ("", "ms", "quartiles", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    ours = statistics.median(seconds[OURS])
    for name, taken in seconds.items():
        low, median, high = (f"{1e3 * quartile:.1f}" for quartile in statistics.quantiles(taken, n=4))
        ratio = statistics.median(taken) / ours
        table.add_row(name, median, f"{low} to {high}", f"{ratio:.2f}")
    Console().print(table)
    print(
        "The time of thinwire includes the momentum and the move of the parameter; those of the all-reduces do not.\n"
        f"DeepSpeed {VERSION} has no bit packer for CPU and used numpy's. Its results agree with the formula.\n"
        f"Workers reuse pages: {' '.join(f'{name}={value}' for name, value in PAGE_REUSE.items())}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"ranks": 4, "elements": 25_000_000, "repeats": 11}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"at least 2; {default:,} by default")
    options = parser.parse_args()
    if min(vars(options).values()) < 2:
        parser.error("expected at least 2 ranks, 2 elements and 2 repeats")
    # A version that was built from source may have a suffix.
    versions = [found.version.split("+")[0] for found in importlib.metadata.distributions(name="deepspeed")]
    if versions != [VERSION]:
        found = f"deepspeed {versions[0]} is" if versions else "deepspeed is not"
        sys.exit(f"{parser.prog}: {found} installed, {VERSION} is needed: pip install 'thinwire[bench]'")

    os.environ.update(PAGE_REUSE, DS_ACCELERATOR="cpu")  # for the ranks, which are new processes
    try:
        with Console(stderr=True).status("This takes a minute or two."):
            seconds: Seconds = run_local_ranks(measure, options.ranks, (options.elements, options.repeats), print)
    except ChildError as error:
        sys.exit(f"{parser.prog}: {error}")
    print_results(options.ranks, options.elements, options.repeats, seconds)


if __name__ == "__main__":
    main()

"""How far the updates of a large parameter are from the limit that memory sets.

python -m benchmarks.memory_limit
python -m benchmarks.memory_limit --methods birder,cd-adam --json memory-limit.json

Kernels only stream memory, so no update can take less time than its bytes need. `benchmarks.roofline_kernels` has the
bytes of every kernel, which tests compare with the tensors that kernels are given. The rate is measured in the same
run, in turns with the updates: all ranks at once add one vector to another in place, 12 bytes per element. Messages
pass through loopback, which copies them; their bytes are few, and not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

import thinwire
from benchmarks.roofline_kernels import FORMS, METHODS, WORKERS
from thinwire.cli.averagings import contender
from thinwire.cli.bench_exchange import ExchangeConfig, RepeatDone, settle, take_turns
from thinwire.cli.launch import Report, run_local_ranks
from thinwire.testbed.supervisor import ChildError

NAMES = {
    "birder": "Birder, bit, fp32 state",
    "onebit-adam": "1-bit Adam, fp32 errors",
    "zero-one-adam": "0/1 Adam, synchronising step",
    "onebit-lamb": "1-bit LAMB",
    "cd-adam": "CD-Adam",
}
"""What the commands call a method, and what the table of bytes calls it."""
ADDED_BYTES = 12
"""Of an element of a vector to which another is added: it is read and written, and the other is read."""
FP32 = FORMS[0]


@dataclass(frozen=True)
class Measured:
    """One method; times are medians."""

    method: str
    update_seconds: float
    """From the first element encoded to the last applied, of the slowest rank."""
    add_seconds: float
    """Of the addition that all ranks do at once."""
    encode_seconds: float
    """The time in encode kernels of rank 0, a step."""
    merge_seconds: float
    apply_seconds: float

    def bytes_per_parameter(self) -> float:
        """What the kernels of one rank read and write."""
        return sum(kernel.read + kernel.written for kernel in METHODS[NAMES[self.method]].kernels(FP32))

    def limit_seconds(self) -> float:
        """The time in which memory moves these bytes."""
        return self.bytes_per_parameter() / ADDED_BYTES * self.add_seconds


def measure(report: Report, methods: Sequence[str], elements: int, repeats: int) -> list[Measured]:
    """Run on every rank."""
    torch.manual_seed(dist.get_rank())
    parameter = nn.Parameter(torch.ones(elements))
    parameter.grad = torch.randn(elements)
    into, other = torch.ones(elements), torch.ones(elements)
    results: list[Measured] = []
    for method in methods:
        config = ExchangeConfig(method, elements, repeats, batch=0, downlink=None, bucket_mb=None)
        exchange = config.exchange(parameter, contender(method, None).measured())
        settle(config, exchange.run)
        before = exchange.by.metrics()
        update, add = take_turns(report, method, repeats, exchange.run, lambda: into.add_(other))
        after = exchange.by.metrics()
        spent = [
            (getattr(after, name) - getattr(before, name)) / (after.steps - before.steps)
            for name in ("encode_seconds", "merge_seconds", "apply_seconds")
        ]
        results.append(Measured(method, median(update), median(add), *spent))
    return results


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(NAMES), help="names from the list above, separated by commas")
    parser.add_argument("--elements", type=int, default=25_000_000, help="of the parameter")
    parser.add_argument("--repeats", type=int, default=15, help="updates that count")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    methods = options.methods.split(",")
    if unknown := [method for method in methods if method not in NAMES]:
        parser.error(
            f"--methods {options.methods}: no bytes are known of {unknown[0]!r}; choose from {', '.join(NAMES)}"
        )
    if min(options.elements, options.repeats) < 2:
        parser.error("expected at least 2 elements and 2 repeats")
    console = Console(stderr=True)
    try:
        with console.status("This takes a minute.") as status:

            def show(done: RepeatDone) -> None:
                status.update(f"{done.what}: {done.done} of {done.of}")

            arguments = (methods, options.elements, options.repeats)
            results: list[Measured] = run_local_ranks(measure, WORKERS, arguments, show)
    except ChildError as error:
        sys.exit(f"{parser.prog}: {error}")
    Console().print(table_of(results, options.elements))
    if options.json is not None:
        report = {
            "benchmark": "memory_limit",
            "thinwire": thinwire.__version__,
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
            "settings": {"ranks": WORKERS, "elements": options.elements, "repeats": options.repeats},
            "results": [
                {**asdict(r), "bytes_per_parameter": r.bytes_per_parameter(), "limit_seconds": r.limit_seconds()}
                for r in results
            ],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def table_of(results: Sequence[Measured], elements: int) -> Table:
    """A row for each method."""
    table = Table(title=f"updates of {elements:,} elements, {WORKERS} local ranks")
    for heading in (
        "method",
        "bytes per parameter",
        "limit, ms",
        "update, ms",
        "limit = 1",
        "encode, merge, apply, ms",
    ):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for result in results:
        limit, spent = result.limit_seconds(), (result.encode_seconds, result.merge_seconds, result.apply_seconds)
        table.add_row(
            result.method,
            f"{result.bytes_per_parameter():.1f}",
            f"{1e3 * limit:.1f}",
            f"{1e3 * result.update_seconds:.1f}",
            f"{result.update_seconds / limit:.2f}",
            ", ".join(f"{1e3 * seconds:.1f}" for seconds in spent),
        )
    return table


if __name__ == "__main__":
    main()

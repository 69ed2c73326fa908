"""The command; see the package."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.differential.configurations import WAYS, Configuration, configuration
from tests.differential.pool import Pool

_LARGEST_SEED = 1 << 32


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as told; 0 if no configuration has failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.differential", description="Train random configurations in ways that must be equal."
    )
    parser.add_argument("--configurations", type=int, default=50, help="how many")
    parser.add_argument("--seed", type=int, help="another one makes others; by default a new one")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON lines; those in it are not run again")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run this one alone, and print it")
    parser.add_argument("--perturb", choices=WAYS, default="", help="flip a bit in this way, which must be noticed")
    options = parser.parse_args(arguments)
    path: Path | None = options.results
    console = Console(soft_wrap=True)
    seed = random.SystemRandom().randrange(_LARGEST_SEED) if options.seed is None else options.seed
    numbers = range(options.configurations) if options.only is None else [options.only]
    say(console, f"--seed {seed}")
    results = [] if path is None else read(path, seed)
    done = {result["number"] for result in results}
    began, before = time.monotonic(), len(done)
    with Pool() as pool:
        for number in numbers:
            if number in done:
                continue
            drawn = replace(configuration(seed, number), perturbed=options.perturb)
            if options.only is not None:
                say(console, repr(drawn))
            wrong = pool.check(drawn)
            results.append(result_of(drawn, wrong))
            if wrong:
                say(console, f"{drawn.label} on {drawn.grid}: {wrong}")
                say(console, drawn.command)
            if path is not None:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(results[-1]) + "\n")
    seconds = time.monotonic() - began
    console.print(summary(results))
    say(console, f"{len(results) - before} configurations in {seconds:.0f} s")
    return 1 if any(result["wrong"] for result in results) else 0


def say(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, markup=False, highlight=False)


def result_of(drawn: Configuration, wrong: str) -> dict[str, Any]:
    """A line of the results."""
    return {"seed": drawn.seed, "number": drawn.number, "subject": drawn.label, "grid": drawn.grid, "wrong": wrong}


def read(path: Path, seed: int) -> list[dict[str, Any]]:
    """The results of earlier calls.

    Raises:
        SystemExit: if they are of another seed.
    """
    results = list(_lines(path)) if path.exists() else []
    seeds = {result["seed"] for result in results} - {seed}
    if seeds:
        raise SystemExit(f"{path} has results of --seed {seeds.pop()}, not {seed}: give the same, or another file")
    return results


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    whole, _, rest = text.rpartition("\n")
    if rest:  # a call was killed while it wrote its last line, and this one runs that configuration again
        path.write_text(whole + "\n" if whole else "", encoding="utf-8")
    for line in whole.splitlines():
        yield json.loads(line)


def summary(results: Sequence[dict[str, Any]]) -> Table:
    """How many of each subject."""
    failed = [result for result in results if result["wrong"]]
    table = Table(title=f"{len(results):,} configurations, {len(failed):,} of them failed")
    table.add_column("subject")
    table.add_column("configurations", justify="right")
    table.add_column("failed", justify="right")
    counts, wrongs = (Counter(result["subject"] for result in some) for some in (results, failed))
    for subject in sorted(counts):
        table.add_row(subject, f"{counts[subject]:,}", f"{wrongs[subject]:,}")
    return table


if __name__ == "__main__":
    # DDP warns on stderr, from C++, of parameters that are used after all.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sys.exit(main())

"""The command; see the package."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.fuzz.checkpoints import Checkpoints
from tests.fuzz.packets import Packets
from tests.fuzz.runner import MOST_FINDINGS, Account, Finding, Target, input_of, read, run_again, run_inputs
from tests.fuzz.steps import Steps
from thinwire.kernels import native

TARGETS: dict[str, Callable[[], Target]] = {"packets": Packets, "steps": Steps, "checkpoints": Checkpoints}
CHUNK = 5000
"""After so many inputs of a target results are written."""
_SHARES = {"packets": Packets.share, "steps": Steps.share, "checkpoints": Checkpoints.share}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as told; 0 if nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Feed thinwire what strangers may send.")
    parser.add_argument("--inputs", type=int, default=100_000, help="how many, over all targets")
    parser.add_argument("--seed", type=int, default=1, help="another one makes other inputs")
    parser.add_argument("--only", choices=TARGETS, nargs="+", default=list(TARGETS), help="some targets")
    parser.add_argument("--findings", type=Path, default=Path("build/fuzz"), help="the folder for inputs that failed")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write counts to it, and continue those in it")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run such an input again, and nothing else")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console(soft_wrap=True)
    if options.replay is not None:
        finding = read(options.replay)
        return _tell(console, [run_again(TARGETS[finding.target], finding)], None)
    whole = sum(_SHARES[name] for name in options.only)
    results = Results(options.results, options.seed)
    for name in options.only:
        results.run(name, max(1, round(options.inputs * _SHARES[name] / whole)))
    accounts = [results.accounts[name] for name in options.only]
    return _tell(console, accounts, options.findings)


class Results:
    """What became of the inputs of all targets so far.

    Args:
        path: the file in which they are kept; None to keep them in memory only.
        seed: of the inputs.

    Raises:
        SystemExit: if the file has results of another seed.
    """

    def __init__(self, path: Path | None, seed: int) -> None:
        self._path, self._seed = path, seed
        self.accounts: dict[str, Account] = {}
        if path is None or not path.exists():
            return
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["seed"] != seed:
            raise SystemExit(
                f"{path} has results of --seed {stored['seed']}, not {seed}: give the same, or another file"
            )
        for name, each in stored["targets"].items():
            maker = TARGETS[name]()
            findings = [
                Finding(name, seed, data=input_of(maker, seed, one["number"]), **one) for one in each["findings"]
            ]
            self.accounts[name] = Account(name, Counter(each["outcomes"]), findings, each["seconds"])

    def run(self, name: str, inputs: int) -> None:
        """Run the inputs of a target that are missing."""
        account = self.accounts.setdefault(name, Account(name, Counter(), []))
        while account.inputs < inputs and len(account.findings) < MOST_FINDINGS:
            stop = inputs if self._path is None else min(inputs, account.inputs + CHUNK)
            account.add(run_inputs(TARGETS[name], self._seed, stop, first=account.inputs))
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        targets = {
            name: {
                "inputs": account.inputs,
                "seconds": round(account.seconds, 1),
                "outcomes": dict(sorted(account.outcomes.items())),
                "findings": [
                    {"number": one.number, "what": one.what, "details": one.details} for one in account.findings
                ],
            }
            for name, account in self.accounts.items()
        }
        written = self._path.with_name(f"{self._path.name}.new")
        written.write_text(json.dumps({"seed": self._seed, "targets": targets}, indent=1) + "\n", encoding="utf-8")
        written.replace(self._path)


def _tell(console: Console, accounts: Sequence[Account], folder: Path | None) -> int:
    kernels = f"{native.isa()} and all others" if native.available() else "none"
    table = Table(title=f"{sum(account.inputs for account in accounts):,} inputs; native kernels: {kernels}")
    table.add_column("target")
    table.add_column("outcome")
    table.add_column("inputs", justify="right")
    for account in accounts:
        for outcome, number in sorted(account.outcomes.items()):
            table.add_row(account.target, outcome, f"{number:,}")
        table.add_row(account.target, "[bold]crash, hang or other exception[/bold]", f"{len(account.findings):,}")
        table.add_section()
    console.print(table)
    for account in accounts:
        rate = account.inputs / account.seconds
        console.print(f"{account.target}: {account.seconds:.0f} s, {rate:,.0f} inputs/s", highlight=False)
    findings = [finding for account in accounts for finding in account.findings]
    for finding in findings:
        _tell_finding(console, finding, folder)
    return 1 if findings else 0


def _tell_finding(console: Console, finding: Finding, folder: Path | None) -> None:
    console.print(f"{finding.target} {finding.number}: {finding.what}", highlight=False, markup=False)
    console.print(finding.details, highlight=False, markup=False)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        console.print(f"--replay {finding.write(folder)}", highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main())

"""The command; see the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.fuzz.checkpoints import Checkpoints
from tests.fuzz.packets import Packets
from tests.fuzz.runner import Account, Finding, Target, read, run_again, run_inputs
from tests.fuzz.steps import Steps
from thinwire.kernels import native

TARGETS: dict[str, Callable[[], Target]] = {"packets": Packets, "steps": Steps, "checkpoints": Checkpoints}
_SHARES = {"packets": Packets.share, "steps": Steps.share, "checkpoints": Checkpoints.share}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as told; 0 if nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Feed thinwire what strangers may send.")
    parser.add_argument("--inputs", type=int, default=100_000, help="how many, over all targets")
    parser.add_argument("--seed", type=int, default=1, help="another one makes other inputs")
    parser.add_argument("--only", choices=TARGETS, nargs="+", default=list(TARGETS), help="some targets")
    parser.add_argument("--findings", type=Path, default=Path("build/fuzz"), help="the folder for inputs that failed")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run such an input again, and nothing else")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console(soft_wrap=True)
    if options.replay is not None:
        finding = read(options.replay)
        return _tell(console, [run_again(TARGETS[finding.target], finding)], None)
    whole = sum(_SHARES[name] for name in options.only)
    accounts = [
        run_inputs(TARGETS[name], options.seed, max(1, round(options.inputs * _SHARES[name] / whole)))
        for name in options.only
    ]
    return _tell(console, accounts, options.findings)


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

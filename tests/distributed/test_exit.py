"""Programs that end with their process group and optimizer still there, as most do: no thread may outlive Python.

`python -m tests.distributed.test_exit --runs 300` shows it for as many runs as one likes.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

from tests.distributed.exit_cases import train_and_leave
from tests.forked import Ended, Run, run_to_the_end

KINDS = (
    "Birder",
    "Birder, delayed",
    "Birder, delayed, no group",
    "OneBitAdam",
    "ZeroOneAdam",
    "CDAdam",
    "SketchedAMSGrad",
)


def ends(kinds: Sequence[str], at_once: int = 8) -> list[Ended]:
    """How the ranks of some runs have ended."""
    cases = [Run(train_and_leave, 2, (kind,), deadline=90) for kind in kinds]
    return [ended for ranks in run_to_the_end(cases, at_once) for ended in ranks]


def test_programs_end_without_a_signal() -> None:
    for ended in ends(KINDS):
        assert (ended.report, ended.status) == ("done", 0), ended.log


def main() -> None:
    """Count exit codes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--kind", choices=("AdamW", *KINDS), default="Birder")
    arguments = parser.parse_args()
    outcomes = ends([arguments.kind] * arguments.runs)
    print(f"{arguments.kind}: exit codes {dict(Counter(ended.status for ended in outcomes))}")
    for ended in outcomes:
        if ended.status:
            print(ended.log)


if __name__ == "__main__":
    main()

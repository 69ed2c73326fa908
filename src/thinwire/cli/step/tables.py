"""The report for a terminal."""

from __future__ import annotations

import re
from itertools import groupby

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from thinwire.cli.step import words
from thinwire.cli.step.results import BASELINE, LIMIT, StepResult, StepResults

HEADINGS = (
    *("method", "step", "quartiles", "optimizer", "exposed wait", "rest", "sent a host", "in theory"),
    *(f"speed, {BASELINE} = 1", f"time, {LIMIT} = 1", "time, bound = 1"),
)
# What a terminal that is too narrow for everything shows all the same.
ESSENTIAL = tuple(heading for heading in HEADINGS if heading not in ("quartiles", "optimizer", "rest", "in theory"))
COLUMNS_FOR_ALL = 124


def cells(row: StepResult) -> tuple[str, ...]:
    """A row under `HEADINGS`."""
    return (
        row.method,
        words.seconds(row.step.median),
        words.span(row.step.low, row.step.high),
        words.seconds(row.optimizer),
        words.seconds(row.exposed_wait),
        words.seconds(row.rest),
        words.byte_count(row.bytes_sent),
        words.byte_count(row.bytes_theory),
        words.ratio(row.speed_up),
        words.ratio(row.to_limit),
        words.ratio(row.to_bound),
    )


def print_results(console: Console, results: StepResults) -> None:
    """A table per model and rate, then what was not measured, and why."""
    plan = results.plan
    where = f"{plan.hosts} hosts × {plan.ranks} {'rank' if plan.ranks == 1 else 'ranks'}"
    shown = HEADINGS if console.width >= COLUMNS_FOR_ALL else ESSENTIAL
    for (model, rate), group in groupby(results.rows(), key=lambda row: (row.model, row.rate)):
        rows = list(group)
        compute = words.seconds(rows[0].compute)
        table = _table(f"{model}, {where}, {words.rate(rate)}; forward and backward alone take {compute}", shown)
        for row in rows:
            named = dict(zip(HEADINGS, cells(row), strict=True))
            # As texts: in a string rich would look for markup, and a name may look like it.
            table.add_row(*(Text(words.visible(named[heading])) for heading in shown))
        console.print(table)
    for gone in results.unmeasured:
        told = words.visible(f" {gone.outcome} on {gone.model}: {gone.reason}")
        console.print(Text.assemble((words.visible(gone.method), "bold"), told))


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    for number, heading in enumerate(headings):
        # Broken here, as rich would rather cut the name of a method short.
        lines = re.sub(r", | a | (?==)|(?<=exposed) ", lambda gap: gap[0].rstrip() + "\n", heading)
        table.add_column(lines, justify="left" if number == 0 else "right", no_wrap=True)
    return table

"""The report for a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from thinwire.cli.step import words
from thinwire.cli.step.results import BASELINE, LIMIT, StepResult, StepResults

MEMORY = "memory a rank"
HEADINGS = (
    *("method", "step", "quartiles", "optimizer", "exposed wait", "rest", "sent a host", "in theory", MEMORY),
    *(f"speed, {BASELINE} = 1", f"time, {LIMIT} = 1", "time, bound = 1"),
)
# What a terminal that is too narrow for everything shows all the same.
ESSENTIAL = tuple(
    heading for heading in HEADINGS if heading not in ("quartiles", "optimizer", "rest", "in theory", MEMORY)
)
COLUMNS_FOR_ALL = 132


def headings_for(rows: Sequence[StepResult]) -> tuple[str, ...]:
    """All `HEADINGS`, but for memory where none was measured."""
    return tuple(heading for heading in HEADINGS if heading != MEMORY or any(row.memory is not None for row in rows))


def cells(row: StepResult, headings: Sequence[str]) -> list[str]:
    """A row under some of the `HEADINGS`."""
    texts = (
        row.method,
        words.seconds(row.step.median),
        words.span(row.step.low, row.step.high),
        words.seconds(row.optimizer),
        words.seconds(row.exposed_wait),
        words.seconds(row.rest),
        words.byte_count(row.bytes_sent),
        words.byte_count(row.bytes_theory),
        "" if row.memory is None else words.byte_count(row.memory),
        words.ratio(row.speed_up),
        words.ratio(row.to_limit),
        words.ratio(row.to_bound),
    )
    named = dict(zip(HEADINGS, texts, strict=True))
    return [named[heading] for heading in headings]


def print_results(console: Console, results: StepResults) -> None:
    """A table per model and rate, then what was not measured, and why."""
    plan = results.plan
    where = f"{plan.hosts} hosts × {plan.ranks} {'rank' if plan.ranks == 1 else 'ranks'}"
    measured = results.rows()
    shown = headings_for(measured) if console.width >= COLUMNS_FOR_ALL else ESSENTIAL
    for (model, rate), group in groupby(measured, key=lambda row: (row.model, row.rate)):
        rows = list(group)
        compute = words.seconds(rows[0].compute)
        table = _table(f"{model}, {where}, {words.rate(rate)}; forward and backward alone take {compute}", shown)
        for row in rows:
            # As texts: in a string rich would look for markup, and a name may look like it.
            table.add_row(*(Text(words.visible(cell)) for cell in cells(row, shown)))
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

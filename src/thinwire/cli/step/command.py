"""What `thinwire bench step` does: check the arguments, measure or read an earlier run, and report."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from thinwire.cli.step import run, words
from thinwire.cli.step.methods import CANNOT_RUN, LARGEST_BUCKET_MB, METHODS, SMALLEST_BUCKET_MB, with_buckets
from thinwire.cli.step.models import MODELS
from thinwire.cli.step.results import StepPlan, StepResults, describe_machine
from thinwire.cli.step.tables import print_results
from thinwire.testbed import Testbed, TestbedUnavailable, parse_rate

ALL_METHODS = (*METHODS, *CANNOT_RUN)


def plan(
    hosts: int, ranks: int, rates: str, models: str, methods: str, buckets: str, rounds: int, seconds: float
) -> StepPlan:
    """What the options ask for; lists are separated by commas.

    Raises:
        typer.BadParameter: for an unknown name or number.
    """
    swept = tuple(with_buckets(size) for size in _bucket_sizes(buckets))
    return StepPlan(
        hosts=hosts,
        ranks=ranks,
        rates=_rates(rates),
        models=_names(models, MODELS, "--models"),
        methods=_names(methods, ALL_METHODS, "--methods") + swept,
        rounds=rounds,
        seconds=seconds,
    )


def _listed(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _names(text: str, known: Iterable[str], option: str) -> tuple[str, ...]:
    known = tuple(known)
    chosen = known if text == "all" else _listed(text)
    for name in chosen:
        if name not in known:
            raise typer.BadParameter(f"unknown name {name!r}; there are {', '.join(known)}, and all", param_hint=option)
    return chosen


def _rates(text: str) -> tuple[str, ...]:
    chosen = _listed(text)
    for rate in chosen:
        try:
            parse_rate(rate)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--rates") from None
    return chosen


def _bucket_sizes(text: str) -> tuple[float, ...]:
    sizes: list[float] = []
    for part in _listed(text) if text else ():
        try:
            sizes.append(float(part))
        except ValueError:
            sizes.append(math.nan)
        if not SMALLEST_BUCKET_MB <= sizes[-1] <= LARGEST_BUCKET_MB:
            limits = f"each from {SMALLEST_BUCKET_MB:g} to {LARGEST_BUCKET_MB:g}"
            raise typer.BadParameter(
                f"must be numbers of MB, like 1,2,4; got {part!r} ({limits} MB)", param_hint="--buckets"
            )
    return tuple(sizes)


def measure(plan: StepPlan, errors: Console) -> StepResults:
    """Run the plan on a testbed of its own, with a bar on a terminal.

    Raises:
        typer.BadParameter: for more hosts than a testbed takes.
        typer.Exit: with code 2 where there can be no testbed, with code 1 when no rank starts.
    """
    try:
        testbed = Testbed(plan.hosts)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--hosts") from None
    machine = describe_machine()
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TimeRemainingColumn()),
    )
    # Drawn when there is something to say, not ten times a second: the ranks need the cores.
    with Progress(
        *columns, console=errors, transient=True, auto_refresh=False, disable=not errors.is_terminal
    ) as progress:
        bar = progress.add_task("starting the ranks", total=None)

        def show(at: run.BenchProgress) -> None:
            description = f"{at.model}, {words.rate(at.rate)}, {at.method}"
            progress.update(bar, description=description, total=at.of, completed=at.turn - 1, refresh=True)

        try:
            with testbed:
                conducted = run.BenchRun(testbed, plan, show)
                conducted.run()
        except (TestbedUnavailable, run.StartError) as error:
            typer.echo(f"thinwire bench step: {error}", err=True)
            raise typer.Exit(2 if isinstance(error, TestbedUnavailable) else 1) from None
    return StepResults(shlex.join(["thinwire", *sys.argv[1:]]), machine, plan, conducted.turns, conducted.unmeasured)


def read(path: Path) -> StepResults:
    """The results of an earlier run.

    Raises:
        typer.BadParameter: for a file that is none; the message names it, and the field that is wrong.
    """
    try:
        return StepResults.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{str(path)!r}: {error}", param_hint="--from-json") from None


def report(results: StepResults, console: Console, *, json: Path | None, html: Path | None, png: Path | None) -> None:
    """Print the tables, and write what was asked for.

    Raises:
        typer.Exit: with code 1 when no method came to an end; there is nothing to draw then.
    """
    print_results(console, results)
    if json is not None:
        json.write_text(results.to_json(), encoding="utf-8")
    if not results.rows():
        typer.echo("thinwire bench step: no method was measured", err=True)
        raise typer.Exit(1)
    # Not at the top: no other command should wait for matplotlib.
    from thinwire.cli.step import charts, page

    if html is not None:
        html.write_text(page.render(results), encoding="utf-8")
    if png is not None:
        charts.write_png(png, results)
    for path in (json, html, png):
        if path is not None:
            console.print(f"Wrote {path}", markup=False, emoji=False, highlight=False, soft_wrap=True)

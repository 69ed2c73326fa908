"""`thinwire bench`: the figures that the README quotes, as a table for a person or JSON for a program."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import thinwire
from thinwire.cli import bench_bytes, bench_exchange, bench_kernels
from thinwire.cli.averagings import contenders
from thinwire.cli.bench_exchange import RepeatDone
from thinwire.cli.launch import run_local_ranks
from thinwire.cli.options import (
    MOST_RANKS,
    Downlink,
    check_elements,
    downlink_of,
    integer,
    number,
    optimizer_name,
    output_file,
)
from thinwire.cli.step import command as step_command
from thinwire.cli.step.methods import LARGEST_BUCKET_MB, SMALLEST_BUCKET_MB
from thinwire.cli.step.models import MODELS
from thinwire.cli.units import byte_count
from thinwire.kernels import native
from thinwire.testbed.supervisor import ChildError

FEWEST_ELEMENTS, MOST_ELEMENTS = 4096, 10**12
MOST_REPEATS = 1_000_000
MOST_WINDOWS = 4096
MOST_THREADS = 1024
LONGEST_TURN = 86_400.0

app = typer.Typer(help="Measure, as ratios within one run.", no_args_is_help=True)

_Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of a table.")]
_Out = Annotated[Path | None, output_file("Write the figures to this file too, as JSON.")]
_Ranks = Annotated[int, integer(2, "Local processes.", maximum=MOST_RANKS)]
_Repeats = Annotated[int, integer(10, "Rounds that count; medians are taken over them.", maximum=MOST_REPEATS)]


@app.command()
def kernels(
    elements: Annotated[
        int, integer(FEWEST_ELEMENTS, "Elements that every kernel runs over.", maximum=MOST_ELEMENTS)
    ] = 25_000_000,
    repeats: _Repeats = 11,
    threads: Annotated[
        int,
        integer(1, "Measure the speed-up on so many threads too, in turns with one.", maximum=MOST_THREADS),
    ] = 1,
    as_json: _Json = False,
    out: _Out = None,
) -> None:
    """Every kernel on one thread against a memcpy, and against torch.

    With --threads, one more column: how many times faster each is on so many threads. Top-k, count sketches and
    checksums always run on one.
    """
    if not native.available():
        typer.echo(
            f"thinwire bench kernels: there are no native kernels to measure, {native.PATH} is missing", err=True
        )
        raise typer.Exit(1)
    check_elements(elements, processes=1)
    rows = bench_kernels.measure(elements, repeats, threads)
    if not as_json:
        table = Table(title=f"Kernels, {elements:,} elements, one thread, {bench_kernels.instruction_set()}")
        columns = ["kernel", "ms", "bytes an element", "GB/s", "against", "its ms", "ratio"]
        for column in [*columns, f"speed-up on {threads} threads"] if threads > 1 else columns:
            table.add_column(column, justify="left" if column in ("kernel", "against") else "right")
        for row in rows:
            table.add_row(
                row.name,
                f"{row.seconds * 1e3:.2f}",
                f"{row.bytes_per_element:.3f}".rstrip("0").rstrip("."),
                f"{row.bytes_per_element * elements / row.seconds / 1e9:.1f}",
                row.baseline,
                f"{row.baseline_seconds * 1e3:.2f}",
                f"{row.ratio:.2f}",
                *([] if threads == 1 else ["" if row.speedup is None else f"{row.speedup:.2f}"]),
            )
        Console().print(table)
    settings = {"elements": elements, "repeats": repeats, "threads": threads, "isa": bench_kernels.instruction_set()}
    _write("kernels", settings, [asdict(row) for row in rows], as_json=as_json, out=out)


@app.command()
def exchange(
    ranks: _Ranks = 4,
    optimizer: Annotated[str, optimizer_name(contenders("bench exchange"), "What is measured")] = "birder",
    elements: Annotated[int, integer(FEWEST_ELEMENTS, "Size of the update.", maximum=MOST_ELEMENTS)] = 25_000_000,
    repeats: _Repeats = 11,
    batch: Annotated[
        int, integer(1, "Windows of 64 characters per rank, for the training step.", maximum=MOST_WINDOWS)
    ] = 2,
    downlink: Annotated[
        Downlink | None, typer.Option(show_default="bit", help="What comes back from Birder's vote.")
    ] = None,
    bucket_mb: Annotated[
        float | None, number(SMALLEST_BUCKET_MB, LARGEST_BUCKET_MB, "The bucket_mb of thinwire.")
    ] = None,
    as_json: _Json = False,
    out: _Out = None,
) -> None:
    """A whole update and a training step between local ranks, against all-reduce + AdamW and DDP + AdamW.

    With compress-…, an exchange alone instead of an update, against all-reduce.
    """
    check_elements(elements, ranks)
    config = bench_exchange.ExchangeConfig(
        optimizer, elements, repeats, batch, downlink_of(optimizer, downlink), bucket_mb
    )
    rows: list[bench_exchange.ExchangeResult] = _measured_by_ranks(bench_exchange.measure, ranks, config)
    if not as_json:
        Console().print(_exchange_table(config.contender.label, ranks, rows))
    settings = {"ranks": ranks, **asdict(config)}
    _write("exchange", settings, [asdict(row) for row in rows], as_json=as_json, out=out)


@app.command(name="bytes")
def whole_run(
    ranks: _Ranks = 4,
    elements: Annotated[int, integer(FEWEST_ELEMENTS, "Parameters of the model.", maximum=MOST_ELEMENTS)] = 262_144,
    steps: Annotated[int, integer(10, "Of 0/1 Adam; the others take a tenth of them.")] = 10_000,
    as_json: _Json = False,
    out: _Out = None,
) -> None:
    """Bytes over a whole run, dense steps included, counted between local ranks, against fp32 averages at all steps."""
    check_elements(elements, ranks)
    config = bench_bytes.BytesConfig(elements, steps)
    rows: list[bench_bytes.BytesResult] = _measured_by_ranks(bench_bytes.measure, ranks, config)
    if not as_json:
        table = Table(title=f"Bytes over whole runs, {elements:,} parameters, {ranks} local ranks")
        for column in ("run", "steps", "dense", "silent", "sent per rank", "all dense", "ratio"):
            table.add_column(column, justify="left" if column == "run" else "right")
        for row in rows:
            table.add_row(
                row.name,
                f"{row.steps:,}",
                f"{row.dense_steps:,}",
                f"{row.silent_steps:,}",
                byte_count(row.bytes_sent),
                byte_count(row.baseline_bytes),
                f"{row.ratio:.4f}",
            )
        Console().print(table)
    _write("bytes", {"ranks": ranks, **asdict(config)}, [asdict(row) for row in rows], as_json=as_json, out=out)


@app.command()
def step(
    hosts: Annotated[int, integer(2, "Hosts, each with a link of its own.")] = 4,
    ranks: Annotated[int, integer(1, "Ranks per host.", maximum=MOST_RANKS)] = 1,
    rates: Annotated[str, typer.Option(help="Rate of each host's link, as tc writes it.")] = "100mbit,1gbit,unlimited",
    methods: Annotated[str, typer.Option(help=f"{', '.join(step_command.ALL_METHODS)}, or all.")] = "all",
    models: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}, or all.")] = "lm-7m",
    rounds: Annotated[
        int,
        integer(1, "Turns of each method at each rate; medians are taken over all of them.", maximum=MOST_REPEATS),
    ] = 3,
    seconds: Annotated[float, number(0.1, LONGEST_TURN, "What the measured steps of a turn may take together.")] = 4.0,
    buckets: Annotated[str, typer.Option(metavar="MB,MB,…", help="Measure birder with these bucket_mb too.")] = "",
    from_json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Report on an earlier run; measure nothing."),
    ] = None,
    json: Annotated[Path | None, output_file("Write what was measured to this file.")] = None,
    html: Annotated[Path | None, output_file("Write a page with charts that needs no network.")] = None,
    png: Annotated[Path | None, output_file("Write the charts as a picture.")] = None,
) -> None:
    """Measure training steps over slow links, with today's methods, thinwire's optimizers and thinwire.compress.

    Hosts are network namespaces of this machine (Linux, root, ip and tc). Every method takes turns with all others.
    """
    if from_json is not None:
        results = step_command.read(from_json)
    else:
        results = step_command.measure(
            step_command.plan(hosts, ranks, rates, models, methods, buckets, rounds, seconds), Console(stderr=True)
        )
    step_command.report(results, Console(), json=json, html=html, png=png)


def _measured_by_ranks(work: Callable[..., list[Any]], ranks: int, config: object) -> list[Any]:
    """What local ranks measure. On a terminal a bar shows the progress."""
    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        tasks: dict[str, Any] = {}

        def show(message: RepeatDone) -> None:
            if message.what not in tasks:
                tasks[message.what] = progress.add_task(message.what, total=message.of)
            progress.update(tasks[message.what], completed=message.done)

        try:
            return run_local_ranks(work, ranks, (config,), show)
        except ChildError as error:
            errors.print(str(error), markup=False, highlight=False)
            raise typer.Exit(1) from None


def _exchange_table(label: str, ranks: int, rows: list[bench_exchange.ExchangeResult]) -> Table:
    table = Table(title=f"{label} between {ranks} local ranks on loopback")
    for column in ("what", label, "against", "its", "ratio", f"where {label}'s time went"):
        numeric = column in (label, "its", "ratio")
        table.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        where = [
            f"{name} {row.details[f'{name}_seconds'] * 1e3:.1f}"
            for name in ("encode", "merge", "apply", "wire", "exposed_wait")
            if f"{name}_seconds" in row.details
        ]
        table.add_row(
            row.name,
            _quantity(row.value, row.unit),
            row.baseline,
            _quantity(row.baseline_value, row.unit),
            f"{row.ratio:.2f}",
            ", ".join(where) + (" ms" if where else ""),
        )
    return table


def _quantity(value: float, unit: str) -> str:
    return f"{value * 1e3:.1f} ms" if unit == "s" else f"{value:.2f} {unit}"


def _write(
    benchmark: str, settings: dict[str, Any], rows: list[dict[str, Any]], *, as_json: bool, out: Path | None
) -> None:
    report = {
        "benchmark": benchmark,
        "thinwire": thinwire.__version__,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "settings": settings,
        "results": rows,
    }
    text = json.dumps(report, indent=2)
    if as_json:
        print(text)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")

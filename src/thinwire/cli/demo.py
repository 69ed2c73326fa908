"""``thinwire demo``: the same small model trained twice on this machine, and what each way costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from thinwire.cli import training
from thinwire.cli.averagings import contenders
from thinwire.cli.charlm import Corpus, ModelShape, load_text
from thinwire.cli.launch import run_local_ranks
from thinwire.cli.options import (
    LARGEST_SEED,
    MOST_RANKS,
    Downlink,
    downlink_of,
    integer,
    optimizer_name,
    output_file,
)
from thinwire.cli.report import Comparison, print_comparison, write_json
from thinwire.testbed.supervisor import ChildError

_MODEL = "Model and batch"


def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            readable=True,
            help="UTF-8 text to train on. Without it: the help texts that come with Python.",
        ),
    ] = None,
    ranks: Annotated[int, integer(1, "Worker processes on this machine.", maximum=MOST_RANKS)] = 4,
    steps: Annotated[int, integer(1, "Training steps of each run.")] = 400,
    optimizer: Annotated[str, optimizer_name(contenders("demo"), "What takes AdamW's place")] = "birder",
    downlink: Annotated[
        Downlink | None,
        typer.Option(
            show_default="bit",
            help="What comes back from Birder's vote: a worker's bit, what most say, or the count of votes.",
        ),
    ] = None,
    seed: Annotated[
        int, integer(0, "Decides the initial model, the data order and the sampling.", maximum=LARGEST_SEED)
    ] = 0,
    out: Annotated[Path, output_file("Where to write the picture.")] = Path("thinwire-demo.png"),
    json: Annotated[Path | None, output_file("Write all results to this file too.")] = None,
    layers: Annotated[int, integer(1, "Blocks of the transformer.", _MODEL, maximum=256)] = 3,
    width: Annotated[int, integer(1, "Width, a multiple of 32.", _MODEL, maximum=8192)] = 128,
    context: Annotated[int, integer(1, "Characters in a window.", _MODEL, maximum=8192)] = 64,
    batch: Annotated[int, integer(1, "Windows a step and worker.", _MODEL, maximum=4096)] = 8,
) -> None:
    """Train a small character transformer twice with local workers, and compare.

    First DDP + AdamW, then DDP + an optimizer of thinwire, or AdamW with compressed averages (compress-…): the same
    initial model, the same data in the same order.
    Everything runs on this machine over loopback, so the network is no bottleneck; the bytes are what a slow one would
    carry.
    """
    # Not at the top, because every worker imports this module and none draws; not later, because it may be missing.
    from thinwire.cli.plots import plot_losses

    try:
        shape = ModelShape(layers, width, context)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--width'") from None
    checked_downlink = downlink_of(optimizer, downlink)
    text = _checked_text(data, context)
    console = Console()
    source = str(data) if data else "the help texts of Python"
    console.print(f"Training on {len(text):,} characters of {source}.", markup=False, emoji=False, highlight=False)

    try:
        with _progress(console) as progress:
            comparison = Comparison(
                *(
                    _run(
                        training.TrainingConfig(text, shape, batch, steps, seed, name, checked_downlink),
                        ranks,
                        progress,
                    )
                    for name in (None, optimizer)
                )
            )
    except ChildError as error:
        typer.echo(f"thinwire demo: {error}", err=True)
        raise typer.Exit(1) from None

    print_comparison(console, comparison)
    plot_losses(out, comparison)
    console.print(f"Wrote {out}", markup=False, emoji=False, highlight=False, soft_wrap=True)
    if json is not None:
        write_json(json, comparison)
        console.print(f"Wrote {json}", markup=False, emoji=False, highlight=False, soft_wrap=True)


def _checked_text(data: Path | None, context: int) -> str:
    try:
        text = load_text(data)
        Corpus.from_text(text, context)
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{str(data)!r} is not UTF-8 text: {error}", param_hint="'--data'") from None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--data'") from None
    return text


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=console,
        # In a file or a pipe a bar is nothing but noise.
        disable=not console.is_terminal,
    )


def _run(config: training.TrainingConfig, ranks: int, progress: Progress) -> training.TrainingResult:
    """Train as planned while the bar moves; where there is no bar, say when the run is over."""
    label = config.label
    bar = progress.add_task(label, total=config.steps, status=f"starting {ranks} ranks")

    def show(message: training.TrainingProgress) -> None:
        status = f"loss {message.loss:.3f}  {message.step / message.seconds:.1f} steps/s"
        progress.update(bar, completed=message.step, status=status)

    outcome: training.TrainingResult = run_local_ranks(training.train, ranks, (config,), show)
    if progress.disable:
        seconds = outcome.cumulative_seconds[-1]
        progress.console.print(f"{label}: {config.steps} steps in {seconds:.1f} s", highlight=False)
    return outcome

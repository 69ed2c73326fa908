"""`thinwire demo`: its options, and the two runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from thinwire.cli.averagings import AVERAGINGS, contender, contenders
from thinwire.cli.charlm import Corpus, ModelShape, load_text
from thinwire.cli.comparison import network
from thinwire.cli.comparison.live import LiveView
from thinwire.cli.comparison.pace import Budget
from thinwire.cli.comparison.report import lines_for_scripts, print_comparison, print_lines, write_json
from thinwire.cli.comparison.results import Comparison
from thinwire.cli.comparison.training import TrainingConfig, TrainingResult, train
from thinwire.cli.launch import run_local_ranks
from thinwire.cli.options import (
    LARGEST_SEED,
    MOST_RANKS,
    Downlink,
    checked_by,
    downlink_of,
    integer,
    number,
    optimizer_name,
    output_file,
)
from thinwire.cli.registry import RECOMMENDED
from thinwire.testbed import Testbed, parse_rate
from thinwire.testbed.supervisor import ChildError

SECONDS = 45.0
"""Of each run: with start-up, trials and validation the demo then takes less than three minutes on two cores."""
COMPRESSORS = {averaging.compressor: name for name, averaging in AVERAGINGS.items() if "demo" in averaging.commands}
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
    ranks: Annotated[int, integer(1, "Workers, each on a host of its own.", maximum=MOST_RANKS)] = 4,
    rate: Annotated[
        str,
        checked_by(
            parse_rate,
            "Rate of each host's link: 100mbit, 1gbit, ... or unlimited for loopback. Needs Linux, root, ip and tc; "
            "elsewhere times are predicted.",
        ),
    ] = "100mbit",
    optimizer: Annotated[
        str | None, optimizer_name(contenders("demo"), "What takes AdamW's place", default=RECOMMENDED)
    ] = None,
    compressor: Annotated[
        str | None,
        optimizer_name(COMPRESSORS, "AdamW stays, and thinwire.compress averages its gradients", kind="compressor"),
    ] = None,
    downlink: Annotated[
        Downlink | None,
        typer.Option(
            show_default="bit",
            help="What comes back from Birder's vote: a worker's bit, what most say, or the count of votes.",
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        number(
            0.1,
            86400.0,
            "Training time of each run. Start-up and validation do not count.",
            show_default=f"{SECONDS:g}",
        ),
    ] = None,
    steps: Annotated[
        int | None, integer(1, "Give both runs so many steps instead of the same time.", show_default="no limit")
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
    """Train a small character transformer twice over slow links, for the same time, and compare.

    First DDP + AdamW, then what thinwire recommends, or what you choose: the same initial model, the same data in the
    same order. Workers are on hosts with slow links, all on this machine. Bytes are counted at the links.
    """
    # Not at the top, because every worker imports this module and none draws; not later, because it may be missing.
    from thinwire.cli.comparison.picture import plot_losses

    try:
        shape = ModelShape(layers, width, context)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--width'") from None
    name = _chosen(optimizer, compressor)
    checked_downlink = downlink_of(name, downlink)
    if seconds is not None and steps is not None:
        raise typer.BadParameter(f"give either --seconds or --steps, got {seconds:g} and {steps}", param_hint="--steps")
    budget = Budget(steps=steps) if steps is not None else Budget(seconds=seconds or SECONDS)
    text = _checked_text(data, context)
    console = Console()
    source = str(data) if data else "the help texts of Python"
    _say(console, f"Training on {len(text):,} characters of {source}.")

    try:
        with network.opened(ranks, rate) as (links, testbed):
            _say(console, _announced(links, ranks))
            config = TrainingConfig(
                *(text, shape, batch, budget, seed, None, checked_downlink),
                interface=None if testbed is None else testbed.hosts[0].interface,
                predicted_rate=links.predicted_bits_per_second,
            )
            baseline, challenger = _both_runs(config, name, ranks, console, links, testbed)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--ranks'") from None
    except ChildError as error:
        typer.echo(f"thinwire demo: {error}", err=True)
        raise typer.Exit(1) from None

    comparison = Comparison(baseline, challenger, links)
    plot_losses(out, comparison)
    print_comparison(console, comparison)
    print_lines(console, lines_for_scripts(contender(name, checked_downlink), challenger.settings))
    _say(console, f"Wrote {out}")
    if json is not None:
        write_json(json, comparison)
        _say(console, f"Wrote {json}")


def _chosen(optimizer: str | None, compressor: str | None) -> str:
    """The name of the contender."""
    if optimizer is not None and compressor is not None:
        raise typer.BadParameter(
            f"give either --optimizer or --compressor, got {optimizer!r} and {compressor!r}", param_hint="--compressor"
        )
    return COMPRESSORS[compressor] if compressor is not None else optimizer or RECOMMENDED


def _announced(links: network.Network, ranks: int) -> str:
    if links.is_emulated:
        return f"{ranks} hosts on this machine, each with a link of {links.rate_name}."
    if links.is_predicted:
        return (
            f"No links of {links.rate_name} here: {links.unavailable}. Training over loopback; times at "
            f"{links.rate_name} are predicted."
        )
    return f"{ranks} workers over loopback."


def _both_runs(
    config: TrainingConfig,
    name: str,
    ranks: int,
    console: Console,
    links: network.Network,
    testbed: Testbed | None,
) -> list[TrainingResult]:
    """Train with AdamW, then with the contender, while progress is shown."""
    configs = [config, replace(config, optimizer=name)]
    results: list[TrainingResult] = []
    time_name = "s predicted" if links.is_predicted else "s"
    with LiveView(console, [config.label for config in configs], time_name) as live:
        for config in configs:
            if results and results[0].clock is not None:
                # Both compute the same: a difference would be noise of this machine.
                config = replace(config, compute=results[0].clock.compute)
            live.begin(ranks)
            results.append(run_local_ranks(train, ranks, (config,), live.show, testbed))
            live.end(results[-1])
    return results


def _checked_text(data: Path | None, context: int) -> str:
    try:
        text = load_text(data)
        Corpus.from_text(text, context)
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{str(data)!r} is not UTF-8 text: {error}", param_hint="'--data'") from None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--data'") from None
    return text


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

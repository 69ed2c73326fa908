"""A plan as text for a terminal, and as JSON for a program."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from thinwire.cli.step import words
from thinwire.planning.cluster import Cluster, Link
from thinwire.planning.links import Links
from thinwire.planning.prediction import Plan, Prediction

COLUMNS = ("method", "sent MB", "step ms", "compute", "wait", "work", "speed", "state GB", "loss")
FORMAT = 1


def cells(prediction: Prediction) -> tuple[str, ...]:
    """The row of a method, in the order of `COLUMNS`."""
    times = (prediction.step, prediction.compute, prediction.exposed_wait, prediction.rest)
    return (
        prediction.title,
        _three_digits(prediction.bytes_per_step / 1e6),
        *(_three_digits(1e3 * seconds) for seconds in times),
        f"{_three_digits(prediction.speed_up)}×",
        _three_digits(prediction.state_bytes / 1e9),
        prediction.loss.text if prediction.loss else "",
    )


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def link_words(link: Link) -> str:
    """A link in words."""
    duplex = ", half duplex" if link.duplex == "half" else ""
    if math.isinf(link.bits_per_second):
        return f"links without a limit{duplex}"
    rate = next(
        f"{link.bits_per_second / size:.3g} {unit}"
        for size, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1.0, "bit/s"))
        if link.bits_per_second >= size or size == 1.0
    )
    return f"links of {rate}, latency {words.seconds(link.latency) if link.latency else '0'}{duplex}"


def cluster_words(cluster: Cluster) -> str:
    """A cluster in words."""
    ranks = f"{cluster.ranks_per_host} rank{'s' if cluster.ranks_per_host > 1 else ''} each"
    others = f"; {len(cluster.other_links)} hosts with other links" if cluster.other_links else ""
    return f"{cluster.hosts} hosts with {ranks}, {link_words(cluster.link)}{others}"


def print_plan(console: Console, plan: Plan) -> None:
    """The table, where its numbers come from, and the answer."""
    title = f"{plan.workload.elements:,} parameters, {cluster_words(plan.cluster)}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        heading = column.replace(" ", "\n")
        table.add_column(heading, justify="left" if column == "method" else "right", no_wrap=True)
    for prediction in plan.predictions:
        chosen = prediction == plan.recommended
        table.add_row(*cells(prediction), style="bold" if chosen else None)
    console.print(table)
    for line in notes(plan):
        console.print(line, markup=False, highlight=False)
    console.print(plan.answer, style="bold", markup=False, highlight=False, soft_wrap=True)
    if plan.recommended is not None:
        console.print(plan.recommended.lines, markup=False, highlight=False, soft_wrap=True)


def print_links(console: Console, links: Links) -> None:
    """What was measured between hosts."""
    sizes = sorted(links.pairs[0].bits_per_second)
    title = f"Measured links of {links.hosts} hosts, in Mbit/s by the size of a message"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("from", "to", "latency", "jitter", *(f"{size >> 10} KiB" for size in sizes)):
        table.add_column(column, justify="right")
    for pair in links.pairs:
        rates = (_three_digits(pair.bits_per_second[size] / 1e6) for size in sizes)
        table.add_row(
            str(pair.sender), str(pair.receiver), words.seconds(pair.latency), words.seconds(pair.jitter), *rates
        )
    console.print(table)


def notes(plan: Plan) -> list[str]:
    """Where the numbers come from."""
    listed = [f"{prediction.title}: {prediction.note}." for prediction in plan.predictions if prediction.note]
    return [
        "All times are predicted, in ms. step = compute + wait + work. wait: for the exchange, after backward. "
        f"work: encode, apply and the optimizer; {plan.costs_from}.",
        "sent: per step and host. state: per rank, beyond parameters and gradients. loss: measured on a small "
        "transformer, against AdamW with as many steps (docs/convergence.md).",
        *listed,
    ]


def as_json(plan: Plan) -> str:
    """All numbers of a plan."""
    workload = plan.workload
    figures: dict[str, Any] = {
        "command": "plan",
        "format": FORMAT,
        "parameters": workload.elements,
        "forward_seconds": workload.forward,
        "backward_seconds": workload.backward,
        "cluster": _finite(asdict(plan.cluster)),
        "flat": plan.flat,
        "costs_from": plan.costs_from,
        "predictions": [asdict(prediction) for prediction in plan.predictions],
        "recommended": None if plan.recommended is None else plan.recommended.method,
        "answer": plan.answer,
    }
    return json.dumps(figures, indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no infinity: a link without a limit has a rate of null."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and math.isinf(value) else value

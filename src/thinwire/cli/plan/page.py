"""A plan as one HTML page with curves: nothing is loaded, so it can be mailed and read without a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from thinwire.cli.plan.tables import COLUMNS, cells, cluster_words, notes
from thinwire.cli.step import charts
from thinwire.cli.step.page import document, table
from thinwire.planning.costs import Costs
from thinwire.planning.methods import BASELINE, METHODS, Method, local_steps
from thinwire.planning.prediction import Curve, Plan, over_hosts, over_rates

RATES = (1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11)
HOSTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_COLOURS = ("theirs", "ink", "limit", "compute", "ours", "wait", "optimizer", "rest")
"""Of the curves, in the order of the methods: those that the page defines."""


def render(plan: Plan, costs: Costs) -> str:
    """The whole page.

    Args:
        plan: what was predicted.
        costs: from what; the curves are predicted from them too.
    """
    methods = [_method(prediction.method) for prediction in plan.predictions]
    by_rate = over_rates(plan, costs, RATES, methods)
    by_hosts = over_hosts(plan, costs, HOSTS, methods)
    panels = [
        charts.Panel("Over the rate of the links", 3.6, draw(by_rate, RATES, "rate of each host's link", rate_label)),
        charts.Panel("Over the number of hosts", 3.6, draw(by_hosts, HOSTS, "hosts", lambda hosts: f"{hosts:g}")),
    ]
    section = charts.Section("Speed-up", "", panels)
    drawn = "\n".join(charts.svg("plan", section, panel) for panel in panels)
    lines = f"<pre>{escape(plan.recommended.lines)}</pre>" if plan.recommended else ""
    return document(
        "thinwire plan",
        [
            "<h1>Does thinwire help?</h1>",
            f'<p class="quiet">{plan.workload.elements:,} parameters, {escape(cluster_words(plan.cluster))}</p>',
            f"<p><b>{escape(plan.answer)}</b></p>{lines}",
            "<h2>Speed-up</h2>",
            "<p>Steps per second, those of DDP in fp32 with the same hosts and links = 1. All else is as above.</p>",
            f'<div class="charts">{drawn}</div>',
            legend(by_rate),
            "<h2>Figures</h2>",
            table(COLUMNS, map(cells, plan.predictions), ours=[method.ours for method in methods]),
            *(f'<p class="quiet">{escape(note)}</p>' for note in notes(plan)),
        ],
    )


def _method(name: str) -> Method:
    return METHODS[name] if name in METHODS else local_steps(int(name.removeprefix("local-")))


def rate_label(bits_per_second: float) -> str:
    """A rate for the ticks of an axis."""
    return f"{bits_per_second / 1e9:g}G" if bits_per_second >= 1e9 else f"{bits_per_second / 1e6:g}M"


def draw(
    curves: Sequence[Curve], places: Sequence[float], axis: str, label: Callable[[float], str]
) -> Callable[[Axes], None]:
    """Speed-ups over numbers that span orders of magnitude."""

    def on(axes: Axes) -> None:
        for curve, colour in zip(curves, _COLOURS, strict=True):
            width = 1.2 if curve.method == BASELINE else 1.8
            axes.plot(places, curve.speed_ups, color=charts.COLOURS[colour], linewidth=width, marker="o", markersize=3)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(places, [label(place) for place in places], rotation=45)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axes.set_xlabel(axis)
        axes.set_ylabel("speed-up")
        axes.grid(axis="y", linewidth=0.8)

    return on


def legend(curves: Sequence[Curve]) -> str:
    """Which colour is which method."""
    items = "".join(
        f'<span><span style="color: var(--{colour})">●</span> {escape(curve.title)}</span> '
        for curve, colour in zip(curves, _COLOURS, strict=True)
    )
    return f'<p style="display: flex; flex-wrap: wrap; gap: .2rem 1.2rem">{items}</p>'

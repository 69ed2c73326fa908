"""The pictures: how much faster, where the time goes, what is sent, and which bucket size.

Every panel is drawn by one function on one set of axes. The page shows panels side by side as long as there is room, so
each is an SVG of its own; the PNG has all of them in one figure.
"""

from __future__ import annotations

import io
import math
import re
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from thinwire.cli.step import words
from thinwire.cli.step.methods import bucket_size, method_named
from thinwire.cli.step.results import BASELINE, LIMIT, StepResult, StepResults

# The page replaces these by colours of its own, one for light and one for dark: so each means one thing only.
COLOURS = {
    "paper": "#ffffff",
    "ink": "#1f2733",
    "muted": "#66707f",
    "grid": "#dde2e9",
    "ours": "#d1495b",
    "theirs": "#8793a6",
    "limit": "#2e8b6f",
    "compute": "#4c78a8",
    "optimizer": "#e2a63b",
    "wait": "#d8573c",
    "rest": "#a58fc2",
}
PARTS = {"compute": "compute", "optimizer": "optimizer", "exposed_wait": "wait", "rest": "rest"}
"""Of a step, as `StepResult` calls them, and their colours."""
# matplotlib escapes < and > in texts and attributes.
_TAG = re.compile(r"<[^>]*>")
PANEL_INCHES = 4.7
ROW_INCHES = 0.27
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "text.color": COLOURS["ink"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.edgecolor": COLOURS["muted"],
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["ink"],
    "grid.color": COLOURS["grid"],
    "svg.fonttype": "none",  # text stays text: it can be searched, and read aloud
}


@dataclass(frozen=True)
class Panel:
    """One set of axes."""

    title: str
    inches: float
    """Height."""
    draw: Callable[[Axes], None]


@dataclass(frozen=True)
class Section:
    """Panels that show the same thing, at several rates or of several models."""

    title: str
    explanation: str
    panels: list[Panel]
    legend: bool = False


def sections(results: StepResults, model: str) -> list[Section]:
    """All that there is to show of a model; sections without figures are left out."""
    rows = [row for row in results.rows() if row.model == model]
    compared = [row for row in rows if bucket_size(row.method) is None]
    failed = [gone.method for gone in results.unmeasured if (gone.model, gone.outcome) == (model, "failed")]
    methods = [m for m in results.plan.methods if m in failed or any(row.method == m for row in compared)]
    return [
        section
        for section in (
            _speed_section(compared, methods, results.plan.rates),
            _time_section(compared, methods, results.plan.rates),
            _bytes_section(compared, methods),
            _sweep_section(rows, results.plan.rates),
        )
        if section.panels
    ]


def _by_rate(rows: Sequence[StepResult], rates: Sequence[str]) -> Iterator[tuple[str, dict[str, StepResult]]]:
    for rate in rates:
        own = {row.method: row for row in rows if row.rate == rate}
        if own:
            yield rate, own


def _height(methods: Sequence[str]) -> float:
    return 0.95 + ROW_INCHES * len(methods)


# Speed-up by bandwidth ------------------------------------------------------------------------------------------------


def _speed_section(rows: Sequence[StepResult], methods: Sequence[str], rates: Sequence[str]) -> Section:
    panels = [
        Panel(words.rate(rate), _height(methods), _draw_speed(own, methods))
        for rate, own in _by_rate(rows, rates)
        if BASELINE in own
    ]
    return Section(
        "Speed-up by bandwidth",
        f"Steps per second, relative to {BASELINE} at the same rate. The dashed line is {LIMIT}, the same "
        "without sending anything: the limit.",
        panels,
    )


def _draw_speed(own: dict[str, StepResult], methods: Sequence[str]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        speeds = {method: row.speed_up or 0.0 for method, row in own.items()}
        widest = max(speeds.values())
        for position, method in _name_rows(axes, methods):
            if method not in own:
                _write(axes, 0.0, position, "failed", muted=True)
                continue
            axes.barh(position, speeds[method], height=0.7, color=COLOURS[_side(method)])
            _write(axes, speeds[method], position, words.ratio(speeds[method]))
        if LIMIT in own:
            axes.axvline(speeds[LIMIT], color=COLOURS["limit"], linestyle=(0, (4, 3)), linewidth=1.2, zorder=0)
        axes.set_xlim(0, 1.2 * widest)
        axes.set_xlabel(f"steps per second, {BASELINE} = 1")

    return draw


# Where the time goes --------------------------------------------------------------------------------------------------


def _time_section(rows: Sequence[StepResult], methods: Sequence[str], rates: Sequence[str]) -> Section:
    panels = [
        Panel(words.rate(rate), _height(methods) + 0.25, _draw_time(own, methods))
        for rate, own in _by_rate(rows, rates)
    ]
    return Section(
        "Where the time goes",
        "A step, split into forward and backward alone, the optimizer, waiting for the network, and the rest: "
        "encoding during backward, and cores that are shared with the exchange.",
        panels,
        legend=True,
    )


def _draw_time(own: dict[str, StepResult], methods: Sequence[str]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        longest = max(sum(getattr(row, part) for part in PARTS) for row in own.values())
        scale, unit = (1.0, "s") if longest >= 2 else (1e3, "ms")
        for position, method in _name_rows(axes, methods):
            if method not in own:
                _write(axes, 0.0, position, "failed", muted=True)
                continue
            left = 0.0
            for part, colour in PARTS.items():
                width = scale * getattr(own[method], part)
                label = part.replace("_", " ") if method == next(iter(own)) else None
                axes.barh(position, width, left=left, height=0.7, color=COLOURS[colour], label=label)
                left += width
            _write(axes, left, position, words.seconds(own[method].step.median))
        axes.set_xlim(0, 1.25 * scale * longest)
        axes.set_xlabel(f"time per step ({unit})")

    return draw


# What is sent ---------------------------------------------------------------------------------------------------------


def _bytes_section(rows: Sequence[StepResult], methods: Sequence[str]) -> Section:
    panels = [Panel("All rates", _height(methods), _draw_bytes(rows, methods))] if rows else []
    return Section(
        "What leaves a host",
        "Bytes a step and host, all headers included, counted at the host's link; the mark is what the method has to "
        "send in theory. The scale is logarithmic.",
        panels,
    )


def _draw_bytes(rows: Sequence[StepResult], methods: Sequence[str]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        sent = {
            method: statistics.median(row.bytes_sent for row in rows if row.method == method)
            for method in dict.fromkeys(row.method for row in rows)
        }
        theory = {row.method: row.bytes_theory for row in rows if row.bytes_theory > 0}
        least = 10.0 ** math.floor(math.log10(max(1.0, min(sent.values()))))
        axes.set_xscale("log")
        axes.set_xlim(least, 30 * max(least, *sent.values()))
        for position, method in _name_rows(axes, methods):
            if method not in sent:
                _write(axes, least, position, "failed", muted=True)
                continue
            axes.barh(position, sent[method] - least, left=least, height=0.7, color=COLOURS[_side(method)])
            _write(axes, sent[method], position, words.byte_count(sent[method]))
            if method in theory:
                ends = (position - 0.43, position + 0.43)
                axes.plot([theory[method]] * 2, ends, color=COLOURS["ink"], linewidth=1.4, solid_capstyle="butt")
        axes.xaxis.set_major_locator(LogLocator(base=1000))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words.short_byte_count(value)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("bytes per step and host")

    return draw


# Bucket sizes ---------------------------------------------------------------------------------------------------------


def _sweep_section(rows: Sequence[StepResult], rates: Sequence[str]) -> Section:
    panels = [
        Panel(words.rate(rate), 2.6, _draw_sweep(own))
        for rate, own in _by_rate(rows, rates)
        if any(bucket_size(method) is not None for method in own)
    ]
    return Section(
        "Bucket size",
        f"Birder's step by bucket_mb, with quartiles; the dashed line is {LIMIT}. Small buckets start early and cost "
        "more round trips, large ones leave more to send when backward is over.",
        panels,
    )


def _draw_sweep(own: dict[str, StepResult]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        swept = sorted((size, row) for method, row in own.items() if (size := bucket_size(method)) is not None)
        sizes = [size for size, _ in swept]
        medians = [1e3 * row.step.median for _, row in swept]
        below = [1e3 * (row.step.median - row.step.low) for _, row in swept]
        above = [1e3 * (row.step.high - row.step.median) for _, row in swept]
        axes.errorbar(
            sizes,
            medians,
            yerr=(below, above),
            color=COLOURS["ours"],
            marker="o",
            markersize=4,
            capsize=3,
            linewidth=1.5,
        )
        top = max(median + more for median, more in zip(medians, above, strict=True))
        if LIMIT in own:
            axes.axhline(1e3 * own[LIMIT].step.median, color=COLOURS["limit"], linestyle=(0, (4, 3)), linewidth=1.2)
            top = max(top, 1e3 * own[LIMIT].step.median)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(0, 1.15 * top)
        axes.set_xlabel("bucket_mb (MB of fp32 gradients)")
        axes.set_ylabel("time per step (ms)")
        axes.tick_params(axis="y", labelcolor=COLOURS["muted"])
        axes.grid(axis="y", linewidth=0.8)

    return draw


# What all have in common ----------------------------------------------------------------------------------------------


def _side(method: str) -> str:
    if method == LIMIT:
        return "limit"
    return "ours" if method_named(method).ours else "theirs"


def _name_rows(axes: Axes, methods: Sequence[str]) -> Iterator[tuple[int, str]]:
    """A row of the chart for each method, the first at the top."""
    # A name with two dollar signs is no formula.
    axes.set_yticks(range(len(methods)), [words.shortened(method) for method in methods], parse_math=False)
    axes.set_ylim(len(methods) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.8)
    axes.spines["left"].set_visible(False)
    return iter(enumerate(methods))


def _write(axes: Axes, x: float, y: float, text: str, *, muted: bool = False) -> None:
    colour = COLOURS["muted" if muted else "ink"]
    axes.annotate(
        text,
        (x, y),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=colour,
        # A line may run through here.
        bbox={"facecolor": COLOURS["paper"], "edgecolor": "none", "pad": 0.5},
    )


def _fill(axes: Axes, panel: Panel) -> None:
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_facecolor("none")
    panel.draw(axes)
    axes.set_title(panel.title)


def _add_legend(figure: Figure | SubFigure, axes: Axes, side: Literal["left", "right"]) -> None:
    handles, labels = axes.get_legend_handles_labels()
    # In words that matplotlib's annotations do not know.
    place: Any = f"outside upper {side}"
    figure.legend(handles, labels, loc=place, ncols=len(PARTS), frameon=False, handlelength=1.0)


def svg(model: str, section: Section, panel: Panel) -> str:
    """A panel as an `<svg>` element that takes its colours from the page around it."""
    label = f"{model}, {section.title}, {panel.title}"
    # Several drawings share a page: the salt makes their ids differ, and the same ones every time.
    with _styled(**{"svg.hashsalt": label}):
        # A figure of its own, without pyplot: no display is looked for and no global state is left.
        figure = Figure(figsize=(PANEL_INCHES, panel.inches), layout="constrained")
        axes = figure.subplots()
        _fill(axes, panel)
        if section.legend:
            _add_legend(figure, axes, "left")
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator"), None))
    return _for_the_page(text.getvalue(), label)


def _for_the_page(drawn: str, label: str) -> str:
    drawn = drawn[drawn.index("<svg") :]
    # matplotlib numbers ids from one in every drawing; no element refers to them.
    referred = {name for tag in _TAG.findall(drawn) for name in re.findall(r"#([\w-]+)", tag)}

    def adapted(tag: str) -> str:
        for role, colour in COLOURS.items():
            tag = tag.replace(colour, f"var(--{role})")
        return re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in referred else "", tag)

    # Tags only: the texts between them may contain names that look like an id or a colour.
    drawn = _TAG.sub(lambda found: adapted(found[0]), drawn)
    drawn = re.sub(r"<metadata>.*?</metadata>\s*", "", drawn, flags=re.DOTALL)
    return re.sub(
        r"<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>",
        lambda found: f'<svg {found[1]} role="img" aria-label="{escape(words.visible(label))}">',
        drawn,
        count=1,
    )


@contextmanager
def _styled(**more: Any) -> Iterator[None]:
    style: dict[Any, Any] = {**_STYLE, **more}
    with mpl.rc_context(style), warnings.catch_warnings():
        # Names may be in any script. A browser finds a font for it, and matplotlib draws a box.
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
        yield


def write_png(path: Path, results: StepResults) -> None:
    """All panels of all models in one picture."""
    drawn = [(model, section) for model in results.plan.models for section in sections(results, model)]
    widest = max(len(section.panels) for _, section in drawn)
    heights = [max(panel.inches for panel in section.panels) + 0.45 for _, section in drawn]
    with _styled():
        figure = Figure(figsize=(PANEL_INCHES * widest, sum(heights)), layout="constrained")
        rows = figure.subfigures(len(drawn), 1, height_ratios=heights, squeeze=False)[:, 0]
        for row, (model, section) in zip(rows, drawn, strict=True):
            row.suptitle(f"{model}: {section.title}", x=0.01, ha="left", fontsize=12, fontweight="bold")
            panels = row.subplots(1, widest, squeeze=False)[0]
            for axes, panel in zip(panels, section.panels, strict=False):
                _fill(axes, panel)
            if section.legend:
                _add_legend(row, panels[0], "right")
            for axes in panels[len(section.panels) :]:
                axes.set_visible(False)
        figure.savefig(path, dpi=130, format="png")

"""A picture a task: quality against steps, and against what was sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from thinwire.cli.study.methods import METHODS
from thinwire.cli.study.summary import Summary, reference
from thinwire.cli.study.tasks import PictureTask, Task

_MARKERS = "osv^D<>PX"  # as many as have no common divisor with the colours
_COLOURS = {name: colormaps["tab20"](i % 20) for i, name in enumerate(METHODS)}
HEADROOM = 1.6
"""How far above the best the worst may be drawn: what is beyond says nothing but that it is beyond."""


def plot_thin_wires(path: Path, by_task: Sequence[Sequence[Summary]]) -> None:
    """Write a PNG with a panel a task: how a run ends over the bits of a parameter in a step, thin wires on the right.

    Runs of a method that differ only in the length of the interval are joined by a line.
    """
    figure = Figure(figsize=(6.75 * len(by_task), 5), layout="constrained")
    names = sorted({_family(summary) for found in by_task for summary in found})
    colours = {name: colormaps["tab20"](i % 20) for i, name in enumerate(names)}
    markers = {name: _MARKERS[i % len(_MARKERS)] for i, name in enumerate(names)}
    for panel, found in zip(figure.subplots(1, len(by_task), squeeze=False)[0], by_task, strict=True):
        families: dict[str, list[Summary]] = {}
        for summary in sorted(found, key=lambda each: -each.bits):
            if math.isfinite(summary.mean):
                families.setdefault(_family(summary), []).append(summary)
        for name, runs in families.items():
            bits, ends = [run.bits for run in runs], [run.mean for run in runs]
            style: dict[str, Any] = {"color": colours[name], "marker": markers[name], "markersize": 5, "label": name}
            panel.errorbar(bits, ends, [run.std for run in runs], capsize=2, linewidth=1, **style)
        adamw = reference(found)
        if adamw is not None:
            panel.axhline(adamw.mean, color="black", linewidth=0.8, linestyle=":")
        best = min(summary.mean for summary in found)
        worst = min(
            max(summary.mean + summary.std for summary in found if math.isfinite(summary.mean)), HEADROOM * best
        )
        panel.set_ylim(best - 0.05 * (worst - best), worst + 0.05 * (worst - best))
        panel.set_xscale("log")
        panel.invert_xaxis()
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xlabel("bits per parameter and step, each way")
        panel.set_title(found[0].task.title, fontsize="medium")
        if isinstance(found[0].task, PictureTask):
            panel.set_ylabel("unseen pictures taken for something else")
            panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        else:
            panel.set_ylabel("cross-entropy of unseen characters (nats)")
    shown = {
        label: line for panel in figure.axes for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend([shown[name] for name in names], names, loc="outside right center", fontsize="small")
    figure.suptitle("How thin can my wire be? The end of equally long runs; dotted: AdamW's", fontsize="medium")
    figure.savefig(path, dpi=130, format="png")


def _family(summary: Summary) -> str:
    """The title without the length of the interval."""
    return summary.method.title.partition(", every ")[0]


def plot_task(path: Path, task: Task, found: Sequence[Summary]) -> None:
    """Write a PNG with two panels, a line a method: means of the seeds, and their spread at the end."""
    figure = Figure(figsize=(13.5, 5), layout="constrained")
    against_steps, against_bytes = figure.subplots(1, 2, sharey=True)
    for summary in found:
        if not math.isfinite(summary.mean):
            continue
        steps, values = zip(*summary.curve(), strict=True)
        sent = list(accumulate(summary.bytes_by_step()))
        style = {"color": _COLOURS[summary.method.name], "marker": ".", "label": summary.method.title}
        against_steps.plot(steps, values, **style)
        against_steps.errorbar(task.steps, summary.mean, summary.std, color=style["color"], capsize=3, marker="D")
        against_bytes.plot([sent[step - 1] / 1e6 for step in steps], values, **style)
    drawn = [value for summary in found for value in (summary.mean, *(value for _, value in summary.curve()))]
    best, worst = min(drawn), min(max(drawn), HEADROOM * min(drawn))
    against_steps.set_ylim(best - 0.05 * (worst - best), worst + 0.02 * (worst - best))
    adamw = reference(found)
    for panel in (against_steps, against_bytes):
        if adamw is not None:
            panel.axhline(adamw.mean, color="black", linewidth=0.8, linestyle=":")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    against_steps.set_xlabel("steps")
    against_bytes.set_xlabel("sent by a worker (MB)")
    against_bytes.set_xscale("log")
    if isinstance(task, PictureTask):
        against_steps.set_ylabel("unseen pictures taken for something else")
        against_steps.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        against_steps.set_ylabel("cross-entropy of unseen characters (nats)")
    figure.legend(*against_bytes.get_legend_handles_labels(), loc="outside right center", title="best in the end first")
    figure.suptitle(
        f"{task.title[0].upper()}{task.title[1:]}, {found[0].results[0].parameters:,} parameters, "
        f"{task.workers} workers, means of {len(found[0].results)} seeds; diamonds: the end, on more of the unseen "
        "data; dotted: AdamW's",
        fontsize="medium",
    )
    figure.savefig(path, dpi=130, format="png")

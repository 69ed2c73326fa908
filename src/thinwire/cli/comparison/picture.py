"""The demo's picture: loss against time, and against what was sent."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinwire.cli.comparison.report import title
from thinwire.cli.comparison.results import Comparison
from thinwire.cli.comparison.training import TrainingResult

COLOURS = ("#6b7280", "#d1495b")
_TITLE_WIDTH = 100


def plot_losses(path: Path, comparison: Comparison) -> None:
    """Write the picture as a PNG."""
    drawn(comparison).savefig(path, dpi=150, format="png")


def drawn(comparison: Comparison) -> Figure:
    """Two panels; training loss is drawn faint and smoothed, validation loss with dots."""
    outcomes = (comparison.baseline, comparison.challenger)
    network = comparison.network
    # A figure of its own, without pyplot: no display is looked for and no global state is left.
    figure = Figure(figsize=(11, 5), layout="constrained")
    against_time, against_bytes = figure.subplots(1, 2, sharey=True)
    for outcome, colour in zip(outcomes, COLOURS, strict=True):
        _draw(against_time, outcome, outcome.cumulative_seconds, colour)
        _draw(against_bytes, outcome, [count / 1e6 for count in outcome.cumulative_bytes], colour)
    baseline, sent = comparison.baseline, comparison.bytes_to_baseline
    if comparison.axis_is_comparable:
        _mark_gain(against_time, baseline, comparison.seconds_to_baseline, baseline.training_seconds, "sooner")
    reached = None if sent is None else sent / 1e6
    _mark_gain(against_bytes, baseline, reached, baseline.cumulative_bytes[-1] / 1e6, "fewer bytes")
    for panel in (against_time, against_bytes):
        panel.set_xlim(left=0)
    if network.is_predicted:
        against_time.set_xlabel(f"PREDICTED training time at {network.rate_name} (s)")
    else:
        caveat = "" if comparison.axis_is_comparable else "; machine busy: do not compare the runs"
        where = "over loopback" if network.is_loopback else f"at {network.rate_name}"
        against_time.set_xlabel(f"training time {where} (s){caveat}")
    against_bytes.set_xlabel("sent per worker (MB)")
    against_time.set_ylabel("cross-entropy per character (nats)")
    against_time.legend(frameon=False, title="dots: validation; faint: training, smoothed", loc="upper right")
    _limit_losses(against_time, outcomes)
    for panel in (against_time, against_bytes):
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle("\n".join(textwrap.wrap(comparison.sentence(), _TITLE_WIDTH)), fontweight="bold")
    figure.supxlabel(f"character transformer, {title(comparison)}", fontsize="small", color="#555555")
    return figure


def _draw(panel: Axes, outcome: TrainingResult, positions: Sequence[float], colour: str) -> None:
    panel.plot(positions, _smoothed(outcome.training_losses), color=colour, alpha=0.35, linewidth=1.2)
    validated = [positions[step - 1] for step, _ in outcome.validation_losses]
    losses = [loss for _, loss in outcome.validation_losses]
    label = f"{outcome.label}: {outcome.validation_loss:.3f} after {outcome.steps:,} steps"
    panel.plot(validated, losses, color=colour, marker="o", markersize=4, linewidth=2, label=label)


def _mark_gain(panel: Axes, baseline: TrainingResult, reached: float | None, end: float, gain: str) -> None:
    """A line from where the challenger had the baseline's last loss to where the baseline had it."""
    goal = baseline.validation_loss
    if reached is None or not 0 < reached < end:
        return
    panel.annotate("", xy=(reached, goal), xytext=(end, goal), arrowprops={"arrowstyle": "<->", "linewidth": 1.2})
    # Below the arrow: the baseline's curve is above it.
    panel.annotate(
        f"{end / reached:.1f} × {gain}",
        xy=((reached + end) / 2, goal),
        xytext=(0, -5),
        textcoords="offset points",
        ha="center",
        va="top",
        fontweight="bold",
    )


def _limit_losses(panel: Axes, outcomes: Sequence[TrainingResult]) -> None:
    """Leave out the first steps: their losses are far above all that is compared."""
    shown = [loss for outcome in outcomes for _, loss in outcome.validation_losses if math.isfinite(loss)]
    if shown:
        room = max(0.1, max(shown) - min(shown))
        panel.set_ylim(min(shown) - 0.08 * room, max(shown) + 0.15 * room)


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Exponential average over about a twenty-fifth of the run, corrected for its start."""
    memory = 1 - 1 / max(1.0, len(losses) / 25)
    average, weight, smooth = 0.0, 0.0, []
    for loss in losses:
        average = memory * average + (1 - memory) * loss
        weight = memory * weight + (1 - memory)
        smooth.append(average / weight)
    return smooth

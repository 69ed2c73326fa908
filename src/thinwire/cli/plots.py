"""The demo's picture: loss against what was sent, and against time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinwire.cli.report import Comparison
from thinwire.cli.training import TrainingResult

COLOURS = ("#777777", "#d1495b")


def plot_losses(path: Path, comparison: Comparison) -> None:
    """Write a PNG with two panels; training loss is drawn faint and smoothed, validation loss with dots."""
    outcomes = (comparison.baseline, comparison.challenger)
    # A figure of its own, without pyplot: no display is looked for and no global state is left.
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    against_bytes, against_time = figure.subplots(1, 2, sharey=True)
    for outcome, colour in zip(outcomes, COLOURS, strict=True):
        _draw(against_bytes, outcome, [count / 1e6 for count in outcome.cumulative_bytes], colour)
        _draw(against_time, outcome, outcome.cumulative_seconds, colour)
    if all(outcome.bytes_sent_per_step > 0 for outcome in outcomes):  # a single worker sends nothing
        against_bytes.set_xscale("log")
    against_bytes.set_xlabel("sent per worker (MB)")
    against_bytes.set_ylabel("cross-entropy per character (nats)")
    caveat = "" if comparison.times_are_comparable else "; machine busy: do not compare the runs"
    against_time.set_xlabel(f"training time on loopback (s){caveat}")
    against_time.legend(frameon=False, title="dots: validation, faint: training (smoothed)")
    for panel in (against_bytes, against_time):
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    first = outcomes[0]
    figure.suptitle(
        f"Character transformer, {first.parameters:,} parameters, {first.ranks} workers on one machine, "
        f"{first.steps} steps"
    )
    figure.savefig(path, dpi=150, format="png")


def _draw(panel: Axes, outcome: TrainingResult, positions: Sequence[float], colour: str) -> None:
    panel.plot(positions, _smoothed(outcome.training_losses), color=colour, alpha=0.4, linewidth=1)
    steps = [step for step, _ in outcome.validation_losses]
    losses = [loss for _, loss in outcome.validation_losses]
    label = f"{outcome.label} (validation {outcome.validation_loss:.3f})"
    panel.plot([positions[step - 1] for step in steps], losses, color=colour, marker="o", markersize=4, label=label)


def _smoothed(losses: Sequence[float], memory: float = 0.9) -> list[float]:
    """Exponential average, corrected for its start."""
    average, weight, smooth = 0.0, 0.0, []
    for loss in losses:
        average = memory * average + (1 - memory) * loss
        weight = memory * weight + (1 - memory)
        smooth.append(average / weight)
    return smooth

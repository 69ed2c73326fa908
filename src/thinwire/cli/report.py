"""What the demo says at the end: a table for a person, JSON for a program."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from thinwire.cli.training import TrainingResult

LINKS = {"1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
# The runs follow one another, so a machine that did something else meanwhile makes their times differ for no reason of
# theirs. It shows in forward + backward, which is the same work in both, and in mean steps far above the median one.
COMPARABLE_COMPUTE = 1.05
COMPARABLE_MEAN = 1.25


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same model on the same data."""

    baseline: TrainingResult
    challenger: TrainingResult

    @property
    def times_are_comparable(self) -> bool:
        """Whether the machine was about as fast in both runs."""
        runs = (self.baseline, self.challenger)
        computes = [run.seconds.compute for run in runs]
        steady = all(run.cumulative_seconds[-1] / run.steps <= COMPARABLE_MEAN * run.seconds.step for run in runs)
        return steady and max(computes) <= COMPARABLE_COMPUTE * min(computes)

    def predicted_step_seconds(self, outcome: TrainingResult, bits_per_second: float) -> float:
        """Step time if every worker had such a link of its own.

        The exchange hides behind forward and backward, unless it only begins when they are over.
        """
        # Both runs compute the same, so a difference in compute is noise: the prediction uses the mean.
        compute = (self.baseline.seconds.compute + self.challenger.seconds.compute) / 2
        ends = [8 * sent / bits_per_second for sent in outcome.cumulative_bytes]
        # Step by step: one that waits for the wire is not made good by others that hardly use it.
        exchanges = (end - begin for begin, end in zip([0.0, *ends], ends, strict=False))
        together = max if outcome.overlaps else operator.add
        return fmean(together(compute, exchange) for exchange in exchanges) + outcome.seconds.optimizer


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print the two runs side by side, then how each number came about."""
    baseline, challenger = comparison.baseline, comparison.challenger
    table = Table(title=f"{baseline.parameters:,} parameters, {baseline.ranks} workers, {baseline.steps} steps")
    table.add_column()
    for label in (baseline.label, challenger.label, "ratio"):
        table.add_column(label, justify="right")

    def add(
        name: str, show: Callable[[float], str], value: Callable[[TrainingResult], float], ratio: bool = True
    ) -> None:
        before, after = value(baseline), value(challenger)
        table.add_row(name, show(before), show(after), f"{before / after:.1f}×" if ratio and after > 0 else "")

    add("validation loss", "{:.3f}".format, lambda outcome: outcome.validation_loss, ratio=False)
    table.add_section()
    add("time per step", _milliseconds, lambda outcome: outcome.seconds.step, ratio=comparison.times_are_comparable)
    add("  forward + backward", _milliseconds, lambda outcome: outcome.seconds.compute, ratio=False)
    # A difference of noisy medians: a value below zero is zero within the noise of this run.
    add("  exposed exchange", _milliseconds, lambda outcome: max(0.0, outcome.seconds.exchange), ratio=False)
    add("  optimizer", _milliseconds, lambda outcome: outcome.seconds.optimizer, ratio=False)
    table.add_section()
    add("sent per step and worker", byte_count, lambda outcome: outcome.bytes_sent_per_step)
    table.add_section()
    for link, rate in LINKS.items():
        add(
            f"predicted, {link}",
            _milliseconds,
            lambda outcome, rate=rate: comparison.predicted_step_seconds(outcome, rate),
        )
    console.print(table)
    for subject, note in _notes(comparison).items():
        console.print(f"{subject}:", highlight=False)
        console.print(Padding(f"[dim]{note}[/dim]", (0, 0, 0, 2)), highlight=False)


def _notes(comparison: Comparison) -> dict[str, str]:
    baseline, challenger = comparison.baseline, comparison.challenger
    notes = {
        "Compared": "workers on one machine, over loopback. The network is not the bottleneck here: the times show "
        "what each exchange costs in work, and the bytes what a thin wire would have to carry.",
        "Validation loss": "of one seed each. Four seeds of the sampling alone spread Birder's over 0.06 in a "
        "simulation of 500 steps: read a smaller difference as none.",
        "Where the time went": "forward + backward is timed in extra passes with the exchange off (no_sync); "
        "exposed exchange is what the exchange adds to that, in backward and in waits after it. Medians over steps, "
        "means over workers. Validation and the extra passes are in no time shown.",
        "Sent": f"{baseline.label}: theoretical, 2(n-1)/n × 4 bytes per parameter, ring all-reduce of fp32 gradients. "
        f"{challenger.label}: counted.",
        "Predicted, not measured": "max(forward + backward, sent / link) + optimizer, as if the exchange overlapped "
        "perfectly; forward + backward is the mean of both runs.",
    }
    if not challenger.overlaps:
        notes["Predicted, not measured"] += (
            f" {challenger.label} sends nothing before all gradients are there: its sent / link is added."
        )
    if challenger.remark is not None:
        notes[f"Steps of {challenger.label}"] = (
            f"{challenger.remark} Bytes per step and predicted times are means over the whole run; other times are "
            "medians."
        )
    if not comparison.times_are_comparable:
        means = [_milliseconds(run.cumulative_seconds[-1] / run.steps) for run in (baseline, challenger)]
        notes["No ratio of step times"] = (
            "the machine was not equally fast in both runs (see forward + backward, the same work in both, and the "
            f"mean steps of {means[0]} and {means[1]}), so do not compare their times. Try again when it is idle."
        )
    if challenger.metrics is not None:
        parts = ", ".join(
            f"{name} {_milliseconds(challenger.metrics[f'{name}_seconds'] / challenger.steps)}"
            for name in ("encode", "wire", "merge", "apply")
        )
        notes[f"Inside {challenger.label}"] = f"{parts}, per step on worker 0; wire includes waits for slower workers."
    return notes


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def byte_count(count: float) -> str:
    """With three digits, in B to GB."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def write_json(path: Path, comparison: Comparison) -> None:
    """Write everything both runs showed; what is not finite becomes null, as JSON has no NaN."""
    runs = {
        role: asdict(outcome)
        | {
            "bytes_sent_source": "theoretical" if outcome.metrics is None else "counted",
            "predicted_step_seconds": {
                link: comparison.predicted_step_seconds(outcome, rate) for link, rate in LINKS.items()
            },
        }
        for role, outcome in (("baseline", comparison.baseline), ("challenger", comparison.challenger))
    }
    results = runs | {"times_are_comparable": comparison.times_are_comparable}
    path.write_text(json.dumps(_finite(results), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

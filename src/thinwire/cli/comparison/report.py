"""What the demo says at the end: a sentence and a table for a person, lines for a script, JSON for a program."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from thinwire.cli.averagings import Averaging, Contender
from thinwire.cli.comparison.results import Comparison
from thinwire.cli.comparison.training import TrainingResult
from thinwire.cli.units import byte_count

LINKS = {"1 Gbit/s": 1e9, "100 Mbit/s": 1e8}


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print the two runs side by side, then how each number came about, then the sentence."""
    console.print(_table(comparison))
    for subject, note in _notes(comparison).items():
        console.print(f"{subject}:", highlight=False)
        console.print(Padding(f"[dim]{note}[/dim]", (0, 0, 0, 2)), highlight=False)
    console.print()
    console.print(f"[bold]{comparison.sentence()}[/bold]", highlight=False)


def title(comparison: Comparison) -> str:
    """What was trained, and on what."""
    baseline, network = comparison.baseline, comparison.network
    where = {
        network.is_loopback: f"{baseline.ranks} workers over loopback",
        network.is_emulated: f"{baseline.ranks} hosts with links of {network.rate_name}",
        network.is_predicted: f"{baseline.ranks} workers, predicted for links of {network.rate_name}",
    }[True]
    return f"{baseline.parameters:,} parameters, {where}"


def _table(comparison: Comparison) -> Table:
    baseline, challenger, network = comparison.baseline, comparison.challenger, comparison.network
    table = Table(title=title(comparison))
    table.add_column()
    for label in (baseline.label, challenger.label, "ratio"):
        table.add_column(label, justify="right")

    def add(
        name: str, show: Callable[[float], str], value: Callable[[TrainingResult], float], ratio: bool = True
    ) -> None:
        before, after = value(baseline), value(challenger)
        table.add_row(name, show(before), show(after), f"{before / after:.1f}×" if ratio and after > 0 else "")

    predicted = ", predicted" if network.is_predicted else ""
    add(f"training time{predicted}", "{:.1f} s".format, lambda outcome: outcome.training_seconds, ratio=False)
    add("steps", "{:,.0f}".format, lambda outcome: outcome.steps, ratio=False)
    add("validation loss", "{:.3f}".format, lambda outcome: outcome.validation_loss, ratio=False)
    if math.isfinite(baseline.validation_loss):
        reached, sent = comparison.seconds_to_baseline, comparison.bytes_to_baseline
        ratio = reached is not None and comparison.axis_is_comparable
        table.add_row(
            f"time to a loss of {baseline.validation_loss:.3f}{predicted}",
            f"{baseline.training_seconds:.1f} s",
            "not reached" if reached is None else f"{reached:.1f} s",
            f"{baseline.training_seconds / reached:.1f}×" if ratio and reached else "",
        )
        table.add_row(
            "sent per worker by then",
            byte_count(baseline.cumulative_bytes[-1]),
            "" if sent is None else byte_count(sent),
            f"{baseline.cumulative_bytes[-1] / sent:.1f}×" if sent else "",
        )
    table.add_section()
    if network.is_predicted:
        add("time per step, predicted", _milliseconds, lambda outcome: outcome.training_seconds / outcome.steps)
    step = "time per step" if network.is_emulated else "time per step over loopback"
    add(step, _milliseconds, lambda outcome: outcome.seconds.step, ratio=comparison.times_are_comparable)
    add("  forward + backward", _milliseconds, lambda outcome: outcome.seconds.compute, ratio=False)
    # A difference of noisy medians: a value below zero is zero within the noise of this run.
    add("  exposed exchange", _milliseconds, lambda outcome: max(0.0, outcome.seconds.exchange), ratio=False)
    add("  optimizer", _milliseconds, lambda outcome: outcome.seconds.optimizer, ratio=False)
    table.add_section()
    add("sent per step and worker", byte_count, lambda outcome: outcome.bytes_sent_per_step)
    if network.is_loopback:
        for link, rate in LINKS.items():
            add(
                f"time per step, predicted, {link}",
                _milliseconds,
                lambda outcome, rate=rate: comparison.predicted_step_seconds(outcome, rate),
            )
    return table


def _notes(comparison: Comparison) -> dict[str, str]:
    baseline, challenger, network = comparison.baseline, comparison.challenger, comparison.network
    notes = {"Compared": _compared(comparison), "Sent": _sent(comparison)}
    notes["Validation loss"] = (
        "of one seed each, in nats per character. Other seeds differ by some hundredths: read a smaller difference as "
        "none."
    )
    notes["Where the time went"] = (
        "forward + backward is timed in extra passes with the exchange off (no_sync); exposed exchange is what the "
        "exchange adds to that, in backward and in waits after it. Medians over steps, means over workers. Start-up, "
        "validation and the extra passes are in no time shown."
    )
    if network.is_predicted or network.is_loopback:
        predicted = (
            "max(forward + backward, sent / link) + optimizer, as if the exchange overlapped perfectly and the network "
            "had no latency; forward + backward is the same in both runs."
        )
        if not challenger.overlaps:
            predicted += f" {challenger.label} sends nothing before all gradients are there: its sent / link is added."
        notes["Predicted, not measured"] = predicted
    if challenger.remark is not None:
        notes[f"Steps of {challenger.label}"] = (
            f"{challenger.remark} Bytes per step and predicted times are means over the whole run; other times are "
            "medians."
        )
    if not comparison.times_are_comparable:
        means = [_milliseconds(run.seconds.mean_step) for run in (baseline, challenger)]
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


def _compared(comparison: Comparison) -> str:
    network = comparison.network
    same = "the same model and the same data in the same order"
    if network.is_emulated:
        place = f"each worker on a host of its own, with a link of {network.rate_name}, all on this machine"
    elif network.is_predicted:
        place = f"workers over loopback; their time on links of {network.rate_name} is predicted step by step"
    else:
        place = (
            "workers over loopback. The network is not the bottleneck: the times show what each exchange costs in work"
        )
    schedule = (
        "Both runs have the same time. The learning rate of each rises in the first tenth of that time and falls to "
        "zero at its end, so neither is cut off"
        if comparison.baseline.steps != comparison.challenger.steps
        else "Both runs take the same steps, with the same schedule of learning rates"
    )
    return f"{same}; {place}. {schedule}."


def _sent(comparison: Comparison) -> str:
    baseline, challenger = comparison.baseline, comparison.challenger
    if comparison.network.is_emulated:
        return "counted at the hosts' interfaces, with the headers of all frames and TCP's acknowledgements."
    return (
        f"{baseline.label}: theoretical, 2(n-1)/n × 4 bytes per parameter, ring all-reduce of fp32 gradients. "
        f"{challenger.label}: counted."
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def lines_for_scripts(contender: Contender, settings: dict[str, Any]) -> list[str]:
    """The lines that give it to a training script, with the settings of this run."""
    if isinstance(contender, Averaging):
        options = "".join(f", {name}={value!r}" for name, value in contender.options.items())
        return [
            "import thinwire",
            "model = DistributedDataParallel(net)  # as before",
            f'thinwire.compress(model, "{contender.compressor}"{options})  # any optimizer, with the settings it has',
        ]
    arguments = ", ".join(f"{name}={value!r}" for name, value in settings.items() if name != "seed")
    return [
        "import thinwire",
        f"opt = thinwire.{contender.optimizer.__name__}(model.parameters(), {arguments})",
        "thinwire.attach(model, opt)  # model is a DistributedDataParallel",
    ]


def print_lines(console: Console, lines: list[str]) -> None:
    """Print the lines as they are, so that they can be copied."""
    console.print("\nIn your own script:", highlight=False)
    for line in lines:
        console.print(f"    {line}", markup=False, emoji=False, highlight=False, soft_wrap=True)
    console.print()


def write_json(path: Path, comparison: Comparison) -> None:
    """Write everything both runs showed; what is not finite becomes null, as JSON has no NaN."""
    runs = {
        role: asdict(outcome)
        | {
            "predicted_step_seconds": {
                link: comparison.predicted_step_seconds(outcome, rate) for link, rate in LINKS.items()
            },
        }
        for role, outcome in (("baseline", comparison.baseline), ("challenger", comparison.challenger))
    }
    network = comparison.network
    results = runs | {
        "sentence": comparison.sentence(),
        "rate": network.rate,
        "links": "emulated" if network.is_emulated else "predicted" if network.is_predicted else "loopback",
        "no_emulated_links_because": network.unavailable,
        "seconds_to_baseline": comparison.seconds_to_baseline,
        "bytes_to_baseline": comparison.bytes_to_baseline,
        "times_are_comparable": comparison.times_are_comparable,
    }
    path.write_text(json.dumps(_finite(results), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

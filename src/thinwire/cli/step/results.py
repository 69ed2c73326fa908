"""What was measured, what follows from it, and both as JSON.

`StepResults` holds what the ranks reported, turn by turn. Everything that a reader sees (`rows`) is computed
from it, so that a report can be made again from the file.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import thinwire
from thinwire.cli.step.fields import Field
from thinwire.cli.step.methods import Cluster, is_method, method_named
from thinwire.cli.step.models import MODELS, parameter_shapes
from thinwire.testbed import parse_rate

BASELINE, LIMIT = "ddp-adamw", "local"
FORMAT = 1
"""Of the JSON file; raised when an old file would be read wrongly."""


@dataclass(frozen=True)
class StepPlan:
    """What to measure."""

    hosts: int
    ranks: int
    rates: tuple[str, ...]
    models: tuple[str, ...]
    methods: tuple[str, ...]
    rounds: int
    seconds: float
    """How long the measured steps of a turn may take together."""

    @property
    def cluster(self) -> Cluster:
        """Where it is measured."""
        return Cluster(self.hosts, self.ranks)


@dataclass(frozen=True)
class Measurement:
    """What a method did in one turn: seconds per step (`compute`: per probe), means over ranks."""

    model: str
    method: str
    rate: str
    step: list[float]
    optimizer: list[float]
    exposed_wait: list[float]
    """Empty where a method does not report it."""
    compute: list[float]
    bytes_sent: list[float]
    """By each host, per step."""
    thinwire: dict[str, float]
    """Counters of thinwire's optimizers, means per step."""
    memory: int | None = None
    """The most bytes that the turn took on the rank that took the most. Files of older versions have none."""


@dataclass(frozen=True)
class Unmeasured:
    """A method of which a model has no figures, and why."""

    model: str
    method: str
    outcome: str
    """"failed" or "skipped"."""
    reason: str
    """In a line."""
    details: str = ""
    """What the ranks wrote to stderr last, tracebacks included."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class StepResult:
    """A method at a rate, over all rounds. Times in seconds per step, bytes per step and host."""

    model: str
    method: str
    rate: str
    turns: int
    steps: int
    step: Spread
    compute: float
    optimizer: float
    exposed_wait: float
    """What thinwire's optimizers report; of others that send, all that is neither computation nor optimizer."""
    rest: float
    """What is left of the step. For thinwire: encoding during backward, and cores shared with the exchange. For a
    method that sends nothing: DDP's copies into its buckets."""
    bytes_sent: float
    bytes_theory: float
    speed_up: float | None
    """Steps per second, relative to `BASELINE`."""
    to_limit: float | None
    """Time per step, relative to `LIMIT`."""
    bound: float
    """max(compute, bytes_theory at the rate), in seconds: no method that sends so much can be faster."""
    to_bound: float
    memory: int | None
    """Model, gradients, activations, state and buffers of a rank, in bytes; None if it was not measured."""


def describe_machine() -> dict[str, Any]:
    """What a reader needs to know of where it was measured, and when."""
    cpu = platform.processor() or platform.machine()
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "thinwire": thinwire.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _cycle_means(values: Sequence[float], cycle: int) -> list[float]:
    """One value per cycle from one per step, so that rare steps that cost more have their share in what is typical."""
    return [statistics.fmean(values[first : first + cycle]) for first in range(0, len(values), cycle)]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


@dataclass(frozen=True)
class StepResults:
    """Everything about one run."""

    command: str
    machine: dict[str, Any]
    plan: StepPlan
    turns: list[Measurement] = field(default_factory=list)
    unmeasured: list[Unmeasured] = field(default_factory=list)

    def rows(self) -> list[StepResult]:
        """What was measured, model by model, rate by rate, in the order of the plan, without methods that failed."""
        left_out = {(gone.model, gone.method) for gone in self.unmeasured}
        rows: list[StepResult] = []
        for model in self.plan.models:
            for rate in self.plan.rates:
                turns = {
                    method: [
                        turn for turn in self.turns if (turn.model, turn.rate, turn.method) == (model, rate, method)
                    ]
                    for method in self.plan.methods
                    if (model, method) not in left_out
                }
                measured = {method: own for method, own in turns.items() if own}
                if measured:
                    rows += self._rows(measured)
        return rows

    def _rows(self, turns: dict[str, list[Measurement]]) -> Iterable[StepResult]:
        """Of one model at one rate."""
        # Forward and backward are the same work for all, so a difference between their probes is noise.
        compute = statistics.median(probe for own in turns.values() for turn in own for probe in turn.compute)
        cycles = {method: method_named(method).cycle for method in turns}
        steps = {
            method: Spread.of([s for turn in own for s in _cycle_means(turn.step, cycles[method])])
            for method, own in turns.items()
        }
        for method, own in turns.items():
            first, step, cycle = own[0], steps[method], cycles[method]
            optimizer = statistics.median(s for turn in own for s in _cycle_means(turn.optimizer, cycle))
            waits = [s for turn in own for s in _cycle_means(turn.exposed_wait, cycle)]
            # A difference of medians: a value below zero is zero within the noise of this run.
            beyond = max(0.0, step.median - compute - optimizer)
            theory = method_named(method).theory(self.plan.cluster, parameter_shapes(first.model))
            wait = statistics.median(waits) if waits else beyond if theory > 0 else 0.0
            bits_per_second = parse_rate(first.rate)
            bound = max(compute, 8 * theory / bits_per_second if bits_per_second else 0.0)
            yield StepResult(
                model=first.model,
                method=method,
                rate=first.rate,
                turns=len(own),
                steps=sum(len(turn.step) for turn in own),
                step=step,
                compute=compute,
                optimizer=optimizer,
                exposed_wait=wait,
                rest=max(0.0, beyond - wait),
                bytes_sent=statistics.median(count for turn in own for count in turn.bytes_sent),
                bytes_theory=theory,
                speed_up=steps[BASELINE].median / step.median if BASELINE in steps else None,
                to_limit=step.median / steps[LIMIT].median if LIMIT in steps else None,
                bound=bound,
                to_bound=step.median / bound,
                memory=self._memory(first.model, method),
            )

    def _memory(self, model: str, method: str) -> int | None:
        """Of the turn with the least at any rate, because a process also loads modules in its first turns."""
        turns = (turn for turn in self.turns if (turn.model, turn.method) == (model, method))
        return min((turn.memory for turn in turns if turn.memory is not None), default=None)

    def to_json(self) -> str:
        """What was measured, and what follows from it."""
        rows = [asdict(row) for row in self.rows()]
        return json.dumps({"benchmark": "step", "format": FORMAT, "rows": rows, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> StepResults:
        """Read what `to_json` wrote; what follows from the measurements is computed again.

        Raises:
            ValueError: for anything else; the message names the field.
        """
        try:
            data = json.loads(text)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        known = isinstance(data, dict) and data.get("benchmark") == "step" and data.get("format") == FORMAT
        if not known:
            raise ValueError(f"not a file of `thinwire bench step --json`, format {FORMAT}")
        # What follows from the measurements is in the file too, and not read.
        parts = {}
        for name in ("command", "machine", "plan", "turns", "unmeasured"):
            if name not in data:
                raise ValueError(f"{name}: missing")
            parts[name] = Field(name, data[name])
        machine = {name: value.scalar() for name, value in parts["machine"].entries()}
        if "date" not in machine:
            raise ValueError("machine.date: missing")
        plan = _read_plan(parts["plan"])
        return cls(
            command=parts["command"].text(),
            machine=machine,
            plan=plan,
            turns=[_read_turn(turn, plan) for turn in parts["turns"].items(0, _MOST)],
            unmeasured=[_read_unmeasured(gone, plan) for gone in parts["unmeasured"].items(0, _MOST)],
        )


# Files may come from others, and from other versions. A number beyond these limits is no measurement, and would be a
# division by zero, an overflow, or a page that no browser can show.
_SHORTEST, _LONGEST = 1e-9, 1e9
_MOST_BYTES = 1e18
_MOST, _MOST_NAMES = 1_000_000, 200


def _read_plan(field: Field) -> StepPlan:
    found = field.members(("hosts", "ranks", "rates", "models", "methods", "rounds", "seconds"))
    names = {}
    for listed in ("rates", "models", "methods"):
        items = found[listed].items(1, _MOST_NAMES)
        names[listed] = tuple(item.name() for item in items)
        if len(set(names[listed])) < len(items):
            raise found[listed].wrong("different names")
    for item in found["rates"].items(1, _MOST_NAMES):
        try:
            parse_rate(item.value)
        except ValueError as error:
            raise ValueError(f"{item.path}: {error}") from None
    for item in found["models"].items(1, _MOST_NAMES):
        item.one_of(MODELS)
    return StepPlan(
        hosts=found["hosts"].integer(1, _MOST),
        ranks=found["ranks"].integer(1, _MOST),
        **names,
        rounds=found["rounds"].integer(1, _MOST),
        seconds=found["seconds"].number(_SHORTEST, _LONGEST),
    )


def _read_turn(field: Field, plan: StepPlan) -> Measurement:
    lists = ("step", "optimizer", "exposed_wait", "compute", "bytes_sent")
    found = field.members(("model", "method", "rate", *lists, "thinwire"), optional=("memory",))

    def numbers(name: str, least: float, most: float, fewest: int = 1) -> list[float]:
        return [item.number(least, most) for item in found[name].items(fewest, _MOST)]

    memory_is_known = "memory" in found and found["memory"].value is not None
    return Measurement(
        model=found["model"].one_of(plan.models),
        method=found["method"].one_of([name for name in plan.methods if is_method(name)]),
        rate=found["rate"].one_of(plan.rates),
        step=numbers("step", _SHORTEST, _LONGEST),
        optimizer=numbers("optimizer", 0, _LONGEST),
        exposed_wait=numbers("exposed_wait", 0, _LONGEST, fewest=0),
        compute=numbers("compute", _SHORTEST, _LONGEST),
        bytes_sent=numbers("bytes_sent", 0, _MOST_BYTES),
        # Some counters are NaN where an optimizer has nothing to count.
        thinwire={name: value.any_number() for name, value in found["thinwire"].entries()},
        memory=found["memory"].integer(0, int(_MOST_BYTES)) if memory_is_known else None,
    )


def _read_unmeasured(field: Field, plan: StepPlan) -> Unmeasured:
    found = field.members(("model", "method", "outcome", "reason"), optional=("details",))
    return Unmeasured(
        model=found["model"].one_of(plan.models),
        # Not one that is known: there may be no such method here, and that is why it has no figures.
        method=found["method"].name(),
        outcome=found["outcome"].name(),
        reason=found["reason"].text(),
        details=found["details"].text() if "details" in found else "",
    )

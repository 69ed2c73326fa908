"""What was measured, what follows from it, and both as JSON.

`Results` holds what the ranks reported, turn by turn. Everything that a reader sees (`rows`, `verdicts`) is computed
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
from thinwire.cli.step.methods import Cluster, method_named
from thinwire.cli.step.models import parameter_shapes
from thinwire.testbed import parse_rate

BASELINE, LIMIT = "ddp-adamw", "local"
FORMAT = 1
"""Of the JSON file; raised when an old file would be read wrongly."""


@dataclass(frozen=True)
class Plan:
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
class Turn:
    """What a method did in one turn: seconds a step (`compute`: a probe), means over ranks."""

    model: str
    method: str
    rate: str
    step: list[float]
    optimizer: list[float]
    exposed_wait: list[float]
    """Empty where a method does not tell."""
    compute: list[float]
    bytes_sent: list[float]
    """By each host, a step."""
    thinwire: dict[str, float]
    """Counters of thinwire's optimizers, means a step."""


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
class Row:
    """A method at a rate, over all rounds. Times in seconds a step, bytes a step and host."""

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
    """Steps a second, relative to `BASELINE`."""
    to_limit: float | None
    """Time a step, relative to `LIMIT`."""
    bound: float
    """max(compute, bytes_theory at the rate), in seconds: no method that sends so much can be faster."""
    to_bound: float


@dataclass(frozen=True)
class Verdict:
    """A bar that was set beforehand, and whether it was met."""

    what: str
    bar: float
    higher_is_better: bool
    measured: float | None

    @property
    def outcome(self) -> str:
        """In a word."""
        if self.measured is None:
            return "not measured"
        met = self.measured >= self.bar if self.higher_is_better else self.measured <= self.bar
        return "met" if met else "MISSED"

    @property
    def wanted(self) -> str:
        """The bar as text."""
        return f"{'≥' if self.higher_is_better else '≤'} {self.bar:g}"


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
    """A value a step as one a cycle, so that rare steps that cost more have their share in what is typical."""
    return [statistics.fmean(values[first : first + cycle]) for first in range(0, len(values), cycle)]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


@dataclass(frozen=True)
class Results:
    """Everything about one run."""

    command: str
    machine: dict[str, Any]
    plan: Plan
    turns: list[Turn] = field(default_factory=list)
    unmeasured: list[Unmeasured] = field(default_factory=list)

    def rows(self) -> list[Row]:
        """What was measured, model by model, rate by rate, in the order of the plan, without methods that failed."""
        left_out = {(gone.model, gone.method) for gone in self.unmeasured}
        rows: list[Row] = []
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

    def _rows(self, turns: dict[str, list[Turn]]) -> Iterable[Row]:
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
            # A difference of medians: what comes out below zero is zero as far as this run can tell.
            beyond = max(0.0, step.median - compute - optimizer)
            theory = method_named(method).theory(self.plan.cluster, parameter_shapes(first.model))
            wait = statistics.median(waits) if waits else beyond if theory > 0 else 0.0
            bits_per_second = parse_rate(first.rate)
            bound = max(compute, 8 * theory / bits_per_second if bits_per_second else 0.0)
            yield Row(
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
            )

    def verdicts(self) -> list[Verdict]:
        """The bars that optimizers have to clear, on the clusters for which they were set."""
        on_4_hosts = (self.plan.hosts, self.plan.ranks) == (4, 1)
        here = [row for row in self.rows() if on_4_hosts and row.model == "lm-7m"]
        flat = {row.rate: row for row in here if row.method == "birder"}
        hierarchical = [
            row.bytes_sent / row.bytes_theory
            for row in self.rows()
            if (self.plan.hosts, self.plan.ranks, row.model, row.method) == (2, 2, "lm-7m", "birder-hierarchical")
        ]
        bytes_ratios = [row.bytes_sent / row.bytes_theory for row in flat.values()]

        def of(rate: str, name: str) -> float | None:
            return getattr(flat[rate], name) if rate in flat else None

        def speed_at_100mbit(method: str) -> float | None:
            return next((row.speed_up for row in here if (row.rate, row.method) == ("100mbit", method)), None)

        return [
            Verdict("100 Mbit/s: steps a second, Birder to ddp-adamw", 18.0, True, of("100mbit", "speed_up")),
            Verdict("1 Gbit/s: steps a second, Birder to ddp-adamw", 2.4, True, of("1gbit", "speed_up")),
            Verdict("unlimited: steps a second, Birder to ddp-adamw", 1.2, True, of("unlimited", "speed_up")),
            Verdict("100 Mbit/s: time a step, Birder to local", 1.25, False, of("100mbit", "to_limit")),
            Verdict("1 Gbit/s: time a step, Birder to local", 1.12, False, of("1gbit", "to_limit")),
            Verdict("bytes that left a host to 2(n-1)/n·d/8, Birder", 1.10, False, max(bytes_ratios, default=None)),
            Verdict(
                "2 hosts × 2 ranks: bytes that left a host to 2(N-1)/N·d/8, hierarchical Birder",
                1.10,
                False,
                max(hierarchical, default=None),
            ),
            *(
                Verdict(f"100 Mbit/s: steps a second, {method} to ddp-adamw", 10.0, True, speed_at_100mbit(method))
                for method in ("onebit-adam", "zero-one-adam", "onebit-lamb")
            ),
        ]

    def to_json(self) -> str:
        """What was measured, and what follows from it."""
        verdicts = [asdict(v) | {"outcome": v.outcome} for v in self.verdicts()]
        derived = {"rows": [asdict(row) for row in self.rows()], "bars": verdicts}
        return json.dumps({"benchmark": "step", "format": FORMAT, **derived, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Read what `to_json` wrote; what follows from the measurements is computed anew.

        Raises:
            ValueError: for anything else.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or (data.get("benchmark"), data.get("format")) != ("step", FORMAT):
            raise ValueError(f"not a file of `thinwire bench step --json`, format {FORMAT}")
        plan: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data["plan"].items()
        }
        return cls(
            command=data["command"],
            machine=data["machine"],
            plan=Plan(**plan),
            turns=[Turn(**turn) for turn in data["turns"]],
            unmeasured=[Unmeasured(**gone) for gone in data["unmeasured"]],
        )

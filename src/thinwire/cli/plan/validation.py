"""`thinwire plan --validate`: predicted steps against measured ones, on the testbed.

What the prediction is made from is measured first, over links without a limit: the computation of a rank, and what
messages cost. Then `thinwire bench step` measures whole steps, which the prediction has not seen.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from thinwire.cli.launch import Report, run_local_ranks
from thinwire.cli.step import run
from thinwire.cli.step.models import MODELS
from thinwire.cli.step.results import StepPlan, StepResults, describe_machine
from thinwire.cli.step.words import seconds
from thinwire.cli.units import rate as rate_words
from thinwire.planning.calibration import measure_costs
from thinwire.planning.cluster import Cluster, Link
from thinwire.planning.costs import Costs
from thinwire.planning.measurement import measure_workload
from thinwire.planning.methods import METHODS
from thinwire.planning.step import simulate_step
from thinwire.planning.workload import Workload
from thinwire.testbed import Testbed, parse_rate

MODEL = "lm-7m"
RATES = ("100mbit", "300mbit", "1gbit")
TOPOLOGIES = {
    (4, 1): ("ddp-adamw", "ddp-bf16", "compress-int4", "birder"),
    (2, 2): ("ddp-adamw", "compress-int4", "birder", "birder-hierarchical"),
}
"""By hosts and ranks per host: the methods of `thinwire bench step`."""
MEDIAN_BAR, WORST_BAR, FEWEST_CELLS = 0.10, 0.25, 20
FORMAT = 1
_PREDICTED_AS = {"ddp-adamw": "ddp", "compress-int4": "int4", "birder-hierarchical": "birder"}
"""Methods that have another name in a plan."""
_LATENCY = 1e-4
"""Of the testbed's links, which are namespaces of one machine: about what a small message takes."""
_STEPS = 12


@dataclass(frozen=True)
class Cell:
    """A method on a topology at a rate. Times in seconds."""

    hosts: int
    ranks: int
    rate: str
    method: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The prediction's, as a part of what was measured."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Validation:
    """All cells, and what they were predicted from."""

    machine: dict[str, Any]
    compute: float
    """Seconds of a core for forward and backward of one rank."""
    costs: Costs
    cells: tuple[Cell, ...]

    @property
    def median_error(self) -> float:
        """Of all cells, without sign."""
        return statistics.median(abs(cell.error) for cell in self.cells)

    @property
    def worst_error(self) -> float:
        """Of all cells, without sign."""
        return max(abs(cell.error) for cell in self.cells)

    @property
    def passed(self) -> bool:
        """Whether the errors are within the bars, over enough cells."""
        within = self.median_error <= MEDIAN_BAR and self.worst_error <= WORST_BAR
        return within and len(self.cells) >= FEWEST_CELLS

    @property
    def summary(self) -> str:
        """In a line."""
        return (
            f"{len(self.cells)} cells: median error {self.median_error:.1%} (at most {MEDIAN_BAR:.0%}), worst "
            f"{self.worst_error:.1%} (at most {WORST_BAR:.0%}): {'passed' if self.passed else 'FAILED'}"
        )

    def as_json(self) -> str:
        """All numbers."""
        figures = {
            "command": "plan --validate",
            "format": FORMAT,
            "machine": self.machine,
            "compute_core_seconds": self.compute,
            "costs": {**asdict(self.costs), "kernels": dict(self.costs.kernels)},
            "median_error": self.median_error,
            "worst_error": self.worst_error,
            "cells": [{**asdict(cell), "error": cell.error} for cell in self.cells],
        }
        return json.dumps(figures, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Validation:
        """Of a file that `as_json` has written."""
        figures: dict[str, Any] = json.loads(text)
        cells = tuple(
            Cell(**{name: value for name, value in cell.items() if name != "error"}) for cell in figures["cells"]
        )
        return cls(figures["machine"], figures["compute_core_seconds"], Costs(**figures["costs"]), cells)

    def as_markdown(self) -> str:
        """The page of docs/benchmarks."""
        about = self.machine
        rows = [
            f"| {cell.hosts} × {cell.ranks} | {rate_words(cell.rate)} | {cell.method} | {seconds(cell.predicted)} "
            f"| {seconds(cell.measured)} | {cell.error:+.1%} |"
            for cell in self.cells
        ]
        return "\n".join(
            [
                "# Predicted against measured steps",
                "",
                "`thinwire plan --validate` made this page. [Does it help me?](../plan.md) explains the prediction.",
                "",
                f"**{self.summary}.**",
                "",
                f"{about['cores']} cores of {about['cpu']}, torch {about['torch']}, {about['date']}, load before "
                f"{about['load_before']:g}. {self.inputs}",
                "",
                "| hosts × ranks | rate | method | predicted | measured | error |",
                "|---|---:|---|---:|---:|---:|",
                *rows,
                "",
            ]
        )

    @property
    def inputs(self) -> str:
        """From what it was predicted, in two sentences."""
        return (
            f"Predicted from {seconds(self.compute)} of a core for forward and backward, and costs "
            f"{self.costs.source}. No cell was used for either."
        )


def validate(console: Console, rounds: int, turn_seconds: float) -> Validation:
    """Measure what the prediction needs, then the cells.

    Args:
        console: for signs of progress.
        rounds: turns of each method at each rate.
        turn_seconds: how long the measured steps of a turn may take together.

    Raises:
        TestbedUnavailable: there can be no testbed here.
        StartError, ChildError: ranks did not start, or failed.
    """
    machine = describe_machine()
    with Testbed(4) as testbed:
        costs, workload = run_local_ranks(_measure_inputs, 4, (MODEL,), _ignore, testbed)
    cells: list[Cell] = []
    for (hosts, ranks), methods in TOPOLOGIES.items():
        plan = StepPlan(hosts, ranks, RATES, (MODEL,), methods, rounds, turn_seconds)

        console.print(f"{hosts} hosts × {ranks}: {len(RATES) * len(methods) * rounds} turns of thinwire bench step")
        with Testbed(hosts) as testbed:
            conducted = run.BenchRun(testbed, plan, _ignore)
            conducted.run()
        results = StepResults("", machine, plan, conducted.turns, conducted.unmeasured)
        cells += compare(results, workload, costs, os.cpu_count() or 1)
    return Validation(machine, workload.compute, costs, tuple(cells))


def compare(results: StepResults, workload: Workload, costs: Costs, cores: float) -> Iterator[Cell]:
    """The cells of a run of `thinwire bench step`, whose hosts share the cores of one machine."""
    hosts, ranks = results.plan.hosts, results.plan.ranks
    for row in results.rows():
        method = METHODS[_PREDICTED_AS.get(row.method, row.method)]
        bits_per_second = parse_rate(row.rate)
        assert bits_per_second is not None, "all rates of a validation are limits"
        cluster = Cluster(hosts, ranks, Link(bits_per_second, _LATENCY), cores=cores, one_machine=True)
        # `bench step` lets every rank be a worker, unless the name says otherwise.
        flat = "hierarchical" not in row.method
        predicted = simulate_step(workload, cluster, method, costs, flat=flat).total
        yield Cell(hosts, ranks, row.rate, row.method, predicted, row.step.median)


def print_validation(console: Console, validation: Validation) -> None:
    """Predicted against measured."""
    table = Table(title="Predicted against measured steps", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("hosts × ranks", "rate", "method", "predicted", "measured", "error"):
        table.add_column(column, justify="right" if column in ("predicted", "measured", "error") else "left")
    for cell in validation.cells:
        times = (seconds(cell.predicted), seconds(cell.measured))
        table.add_row(f"{cell.hosts} × {cell.ranks}", rate_words(cell.rate), cell.method, *times, f"{cell.error:+.1%}")
    console.print(table)
    console.print(validation.inputs, markup=False, highlight=False, soft_wrap=True)
    console.print(validation.summary, markup=False, highlight=False, soft_wrap=True)


def _measure_inputs(report: Report, model: str) -> tuple[Costs, Workload]:
    """What each rank measures, all of them at the same time, as when they train."""
    del report
    costs = measure_costs()
    torch.manual_seed(0)
    built = MODELS[model].build()
    batch = MODELS[model].batch(torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        built(*batch).backward()
        built.zero_grad()

    dist.barrier()
    workload = measure_workload(step, _STEPS)
    dist.barrier()
    return costs, workload


def _ignore(message: object) -> None:
    """For those that report progress."""
    del message

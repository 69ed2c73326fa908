"""Leads the ranks on a testbed through their turns, and goes on without the methods that fail."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from thinwire.cli.step.methods import METHODS, obstacle
from thinwire.cli.step.models import parameter_shapes
from thinwire.cli.step.ranks import MeasurementError, Ranks
from thinwire.cli.step.results import BASELINE, Measurement, StepPlan, Unmeasured
from thinwire.cli.step.worker import Record
from thinwire.testbed import Testbed, parse_rate

# A few interpreters import torch at the same time, on cores that they share.
SECONDS_TO_START = 300.0
# Ranks show life once a step, and no step sends much more than the baseline's.
LEAST_PATIENCE, PATIENCE_IN_BASELINE_STEPS = 60.0, 5.0


class StartError(RuntimeError):
    """No rank can run, whatever the method."""


@dataclass(frozen=True)
class BenchProgress:
    """The turn that is about to begin, or goes on."""

    turn: int
    of: int
    model: str
    rate: str
    method: str


class BenchRun:
    """Runs a plan on a testbed.

    Every method takes a turn in every round, and each round begins with another method, so that a noisy neighbour hits
    all alike. A turn begins at the rate that counts, because connections adapt to their interface when they are made;
    it warms up without any limit, to save time; and it is measured at the rate again.
    """

    def __init__(self, testbed: Testbed, plan: StepPlan, on_progress: Callable[[BenchProgress], None]) -> None:
        self._testbed = testbed
        self._plan = plan
        self._on_progress = on_progress
        self._progress = BenchProgress(0, 0, "", "", "")
        self._ranks: Ranks | None = None
        self.turns: list[Measurement] = []
        self.unmeasured: list[Unmeasured] = []

    @property
    def pids(self) -> list[int]:
        """The rank processes that run now."""
        return [] if self._ranks is None else self._ranks.pids

    def run(self) -> None:
        """Take all turns; `turns` and `unmeasured` tell what came of it."""
        self._skip_what_makes_no_sense()
        schedule = list(self._schedule())
        try:
            for number, (model, rate, method) in enumerate(schedule, start=1):
                if not any((gone.model, gone.method) == (model, method) for gone in self.unmeasured):
                    self._progress = BenchProgress(number, len(schedule), model, rate, method)
                    self._on_progress(self._progress)
                    self._take_turn(model, rate, method)
        finally:
            self._end_ranks()

    def _skip_what_makes_no_sense(self) -> None:
        for model in self._plan.models:
            for method in self._plan.methods:
                reason = obstacle(method, self._plan.cluster)
                if reason is not None:
                    self.unmeasured.append(Unmeasured(model, method, "skipped", reason))

    def _schedule(self) -> Iterator[tuple[str, str, str]]:
        for model in self._plan.models:
            for rate in self._plan.rates:
                for round_number in range(self._plan.rounds):
                    first = round_number % len(self._plan.methods)
                    for method in self._plan.methods[first:] + self._plan.methods[:first]:
                        yield model, rate, method

    def _take_turn(self, model: str, rate: str, method: str) -> None:
        """Measure, or note why that was not possible."""
        ranks = self._ranks or self._started()
        try:
            self.turns.append(self._measured(ranks, model, rate, method))
        except MeasurementError as failure:
            self.unmeasured.append(Unmeasured(model, method, "failed", str(failure), ranks.output()))
            # Some of them may wait for the one that failed, and none is in a state to go on from.
            self._end_ranks()

    def _measured(self, ranks: Ranks, model: str, rate: str, method: str) -> Measurement:
        patience = self._patience(model, rate)
        self._testbed.set_rate(rate)
        ranks.command(patience, "prepare", model=model, method=method)
        self._testbed.set_rate(None)
        ranks.command(patience, "warm up")
        self._testbed.set_rate(rate)
        ranks.command(patience, "settle", seconds=self._plan.seconds)
        # All ranks wait for a command now, so nothing is on its way that should not be counted, or should be.
        before = self._testbed.bytes_sent()
        records: list[Record] = ranks.command(patience, "measure")
        after = self._testbed.bytes_sent()
        ranks.command(patience, "end")
        steps = len(records[0].step)
        memory = [record.memory for record in records if record.memory is not None]
        return Measurement(
            model=model,
            method=method,
            rate=rate,
            step=_means_over_ranks(records, "step"),
            optimizer=_means_over_ranks(records, "optimizer"),
            exposed_wait=_means_over_ranks(records, "exposed_wait"),
            compute=_means_over_ranks(records, "compute"),
            bytes_sent=[(end - begin) / steps for begin, end in zip(before, after, strict=True)],
            thinwire={
                name: statistics.fmean(record.thinwire[name] for record in records) for name in records[0].thinwire
            },
            memory=max(memory, default=None),
        )

    def _patience(self, model: str, rate: str) -> float:
        bits_per_second = parse_rate(rate)
        if bits_per_second is None:
            return LEAST_PATIENCE
        baseline = METHODS[BASELINE].theory(self._plan.cluster, parameter_shapes(model))
        return LEAST_PATIENCE + PATIENCE_IN_BASELINE_STEPS * 8 * baseline / bits_per_second

    def _started(self) -> Ranks:
        self._ranks = Ranks(self._testbed, self._plan.ranks, lambda: self._on_progress(self._progress)).__enter__()
        try:
            self._ranks.answers(SECONDS_TO_START, "start")
        except MeasurementError as failure:
            raise StartError(f"the ranks did not start: {failure}\n{self._ranks.output()}") from None
        return self._ranks

    def _end_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.__exit__()
            self._ranks = None


def _means_over_ranks(records: list[Record], name: str) -> list[float]:
    return [statistics.fmean(values) for values in zip(*(getattr(record, name) for record in records), strict=True)]

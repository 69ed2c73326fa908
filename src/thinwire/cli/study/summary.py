"""What the results of the study come to: the best setting of each method, and how it compares with AdamW."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev

from thinwire.cli.study.methods import METHODS, Method, Setting
from thinwire.cli.study.runs import Result
from thinwire.cli.study.search import FRESH_SEEDS, best_setting
from thinwire.cli.study.store import Store
from thinwire.cli.study.tasks import Task

LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}
REFERENCE = "adamw"


@dataclass(frozen=True)
class Summary:
    """The best setting of a method on a task, on all fresh seeds."""

    task: Task
    method: Method
    results: list[Result]

    @property
    def setting(self) -> Setting:
        """The best one."""
        return self.results[0].setting

    @property
    def values(self) -> list[float]:
        """What each seed ended with, less being better."""
        return [self.task.value(result.final) for result in self.results]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return fmean(self.values)

    @property
    def std(self) -> float:
        """Over the seeds, of one of them; not a number if one has diverged."""
        return stdev(self.values) if math.isfinite(self.mean) else math.nan

    def curve(self) -> list[tuple[int, float]]:
        """Steps, and the mean of the seeds after each; without the last, which was looked at with more data."""
        by_step = zip(*(result.points for result in self.results), strict=True)
        return [(points[0].step, fmean(self.task.value(point.score) for point in points)) for points in by_step][:-1]

    def bytes_by_step(self) -> list[float]:
        """What a worker sends, for every step."""
        return [sent for steps, sent in self.results[0].bytes_sent for _ in range(steps)]

    @property
    def bits(self) -> float:
        """The bits of a parameter that a worker sends in a step and direction, averaged over the run: 32 for AdamW."""
        result, workers = self.results[0], self.task.workers
        return 8 * sum(self.bytes_by_step()) / self.task.steps / result.parameters / (2 * (workers - 1) / workers)

    def seconds(self, bits_per_second: float, compute: float) -> float:
        """A run, if every worker had a link of its own, and a core: predicted.

        The exchange hides behind forward and backward, unless it only begins when they are over.
        """
        together = max if self.method.overlaps else operator.add
        return sum(together(compute, 8 * sent / bits_per_second) for sent in self.bytes_by_step())

    def steps_to(self, value: float) -> int | None:
        """How many steps it takes to be as good as that, between looks by a straight line; None if it never is."""
        before: tuple[int, float] | None = None
        for step, reached in self.curve():
            if reached <= value:
                if before is None or math.isinf(before[1]):
                    return step
                share = (before[1] - value) / (before[1] - reached)
                return math.ceil(before[0] + share * (step - before[0]))
            before = (step, reached)
        return None


def summaries(directory: Path, task: Task, methods: Sequence[str]) -> list[Summary]:
    """Of all methods whose study of a task is complete, the best first."""
    found = []
    for name in methods:
        where = task.reference if name == REFERENCE and task.reference is not None else task
        method, results = METHODS[name], Store(directory, where, name, data=None).results
        source = method.settings_of
        searched = results
        if source is not None and not method.searches_rate:
            searched = Store(directory, where, source, data=None).results
        setting = best_setting(task, searched)
        of_seeds = {result.seed: result for result in results if result.setting == setting}
        if set(FRESH_SEEDS) <= set(of_seeds):
            found.append(Summary(task, method, [of_seeds[seed] for seed in FRESH_SEEDS]))
    if task.reference is not None and all(summary.method.name == REFERENCE for summary in found):
        return []  # AdamW's results are those of the other task
    return sorted(found, key=lambda summary: summary.mean)


def reference(found: Sequence[Summary]) -> Summary | None:
    """AdamW's among them."""
    return next((summary for summary in found if summary.method.name == REFERENCE), None)


def compute_seconds(found: Sequence[Summary]) -> float:
    """Forward and backward of a worker: the same for all methods, so the median of all runs."""
    return median(result.compute_seconds for summary in found for result in summary.results)

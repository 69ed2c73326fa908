"""What came of `thinwire chaos --elastic`: what workers have reported, and the figures that follow from it.

*Living* is a worker from the first outer step that it has taken with the others to its last one. Its time consists of
intervals between its outer steps, and each of them has the inner steps that it has taken. The throughput of the living
is the sum of these inner steps divided by the sum of these seconds: what waiting for the dead, quorums, exchanges that
are repeated, and workers that join cost those who live. What the dead lose is not in it: neither their last interval,
which ended with them, nor the time until another worker has taken their place. `share_of_full_strength` has both.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import thinwire

LEAST_THROUGHPUT = 0.97
MOST_SECONDS_TO_REJOIN = 15.0

QUIET = "nothing"
DEATH = "a death"
JOIN = "a join at its end"
FIRST = "the first with a new worker"
HAPPENINGS = (QUIET, DEATH, JOIN, FIRST)
"""What may have happened in an interval."""


@dataclass(frozen=True)
class Started:
    """A process has imported what it needs."""

    at: float
    """By `time.monotonic()`, which all processes of a machine share."""
    starved: float
    """Seconds for which its main thread has waited for one of the cores, which real hosts do not share."""


@dataclass(frozen=True)
class OuterStep:
    """An outer step of a worker, as it is when the quorum of the next interval is complete."""

    number: int
    """Of the run."""
    exchange: tuple[int, int]
    """The exchanges of the run so far, and the number of the quorum in which the last was made: workers that took part
    in the same exchange have the same."""
    steps: int
    """The inner steps that the worker has taken since its last report."""
    at: float
    exchanging: float
    """Seconds since the worker was done with its inner steps."""
    starved: float
    """As in `Started`, since the start of the process."""
    workers: int
    """In the quorum of the next interval."""
    digest: str
    """Of the parameters, θ_ref and the outer momentum."""
    loss: float | None
    """Of the last inner step, on the worker's own examples; None before the first."""


@dataclass(eq=False)
class Life:
    """A worker from its start to its end."""

    host: int
    number: int
    started: float
    imported: float | None = None
    """When it had imported torch, and all else."""
    starved_in_imports: float = 0.0
    killed: float | None = None
    outer_steps: list[OuterStep] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For people to read."""
        return f"the worker of host {self.host}" + (f", restart {self.number}" if self.number else "")


@dataclass(frozen=True)
class Interval:
    """The time of a worker between two outer steps."""

    begin: float
    seconds: float
    steps: int
    exchanging: float
    happened: str


@dataclass(frozen=True)
class Rejoin:
    """A worker that was killed, and the one that took its place."""

    host: int
    killed_at: float
    """Seconds since the kills began."""
    lost_steps: int
    """The inner steps that were lost with it, by its pace: those since its last outer step."""
    seconds: float | None
    """From the start of the new process to the first outer step that it has taken with the others; None for never."""
    seconds_to_import: float | None
    """What of that went into starting Python, and importing torch and torchft."""
    seconds_starved: float = 0.0
    """What of that its main thread has waited for one of the cores of this machine, in and after the imports."""

    @property
    def in_time(self) -> bool:
        """Whether it took no longer than it may, not counting the time in which it waited for a core."""
        return self.seconds is not None and self.seconds - self.seconds_starved <= MOST_SECONDS_TO_REJOIN


@dataclass(frozen=True)
class Divergence:
    """An outer step after which workers are not equal."""

    number: int
    found: dict[str, str]
    """What each worker has: the exchange and the digest."""


def intervals_of(life: Life) -> list[Interval]:
    """The time of a worker while it is living."""
    found: list[Interval] = []
    joined_before = False
    for before, after in zip(life.outer_steps, life.outer_steps[1:], strict=False):
        happened = FIRST if joined_before else QUIET
        joined_before = after.workers > before.workers
        if after.workers < before.workers:
            happened = DEATH
        elif joined_before:
            happened = JOIN
        found.append(Interval(before.at, after.at - before.at, after.steps, after.exchanging, happened))
    return found


def intervals_between(lives: Iterable[Life], begin: float, end: float) -> list[Interval]:
    """Those of all workers that began in this time."""
    return [interval for life in lives for interval in intervals_of(life) if begin <= interval.begin < end]


def throughput(intervals: Sequence[Interval]) -> float:
    """Inner steps per second of a living worker.

    Raises:
        ValueError: if there is no interval.
    """
    if not intervals:
        raise ValueError("no worker has taken two outer steps in this time: make it longer")
    return sum(interval.steps for interval in intervals) / sum(interval.seconds for interval in intervals)


def divergences(lives: Sequence[Life]) -> list[Divergence]:
    """The outer steps after which workers have different bits.

    Workers that took part in the same exchange must be equal. Those that went on from an outer step must have taken
    part in the same exchange; one that was killed at once may have completed an exchange that the others had to repeat
    without it.
    """
    found: list[Divergence] = []
    numbers = sorted({outer_step.number for life in lives for outer_step in life.outer_steps})
    for number in numbers:
        taken = [(life, step) for life in lives for step in life.outer_steps if step.number == number]
        digests: dict[tuple[int, int], set[str]] = {}
        for _, step in taken:
            digests.setdefault(step.exchange, set()).add(step.digest)
        went_on = {step.exchange for life, step in taken if life.killed is None or life.outer_steps[-1] is not step}
        if len(went_on) > 1 or any(len(different) > 1 for different in digests.values()):
            found.append(Divergence(number, {life.name: f"{step.exchange} {step.digest}" for life, step in taken}))
    return found


@dataclass
class ElasticResults:
    """All of a run."""

    hosts: int
    rate: str
    every: int
    """Inner steps between outer ones."""
    step_seconds: float
    seconds_between_kills: float
    seconds_to_restart: float
    heartbeat_timeout: float
    seed: int
    date: str = ""
    lives: list[Life] = field(default_factory=list)
    quiet_began: float = 0.0
    began: float = 0.0
    """When the kills began; the quiet time ends then."""
    ended: float = 0.0

    @property
    def quiet(self) -> list[Interval]:
        """The intervals of the time without kills."""
        return intervals_between(self.lives, self.quiet_began, self.began)

    @property
    def disturbed(self) -> list[Interval]:
        """The intervals of the time with kills."""
        return intervals_between(self.lives, self.began, self.ended)

    @property
    def relative_throughput(self) -> float:
        """Inner steps per second of the living, relative to the time without kills."""
        return throughput(self.disturbed) / throughput(self.quiet)

    @property
    def share_of_deaths_and_joins(self) -> float:
        """The share of the time of the living that deaths and joins have cost, by the intervals of the same time in
        which there was neither. It does not depend on how busy the machine was in the time without kills."""
        alone = [interval for interval in self.disturbed if interval.happened == QUIET]
        return 1 - throughput(self.disturbed) / throughput(alone)

    @property
    def share_of_full_strength(self) -> float:
        """Inner steps of all hosts that went into outer steps, relative to as many workers of which none is killed."""
        steps = sum(interval.steps for interval in self.disturbed)
        return steps / (self.hosts * (self.ended - self.began) * throughput(self.quiet))

    @property
    def divergences(self) -> list[Divergence]:
        """Outer steps after which workers were not equal."""
        return divergences(self.lives)

    @property
    def rejoins(self) -> list[Rejoin]:
        """One for each kill."""
        return [self._rejoin(life) for life in sorted(self.lives, key=lambda life: life.killed or 0.0) if life.killed]

    def _rejoin(self, life: Life) -> Rejoin:
        assert life.killed is not None
        followers = [each for each in self.lives if (each.host, each.number) == (life.host, life.number + 1)]
        seconds = to_import = None
        starved = 0.0
        for follower in followers:
            to_import, starved = _since(follower.started, follower.imported), follower.starved_in_imports
            if follower.outer_steps:
                seconds, starved = follower.outer_steps[0].at - follower.started, follower.outer_steps[0].starved
        since = life.killed - life.outer_steps[-1].at if life.outer_steps else 0.0
        lost = min(self.every, int(since / self.step_seconds))
        return Rejoin(life.host, life.killed - self.began, lost, seconds, to_import, starved)

    @property
    def misses(self) -> list[str]:
        """What must not be: divergences, and workers that rejoin too late."""
        found = [f"after outer step {each.number} workers are not equal" for each in self.divergences]
        for each in self.rejoins:
            if not each.in_time:
                took = "never" if each.seconds is None else f"{each.seconds:.1f} s after its start"
                found.append(
                    f"the worker of host {each.host}, killed after {each.killed_at:.0f} s, rejoined {took} "
                    f"({each.seconds_starved:.1f} s of which it waited for a core), not within "
                    f"{MOST_SECONDS_TO_REJOIN:g} s"
                )
        return found

    @property
    def slowest_rejoin(self) -> float | None:
        """In seconds, without the time in which it waited for a core. None if a worker has never rejoined."""
        seconds = [None if each.seconds is None else each.seconds - each.seconds_starved for each in self.rejoins]
        return None if None in seconds else max((each for each in seconds if each is not None), default=None)

    def extra_seconds(self, happened: str) -> tuple[int, float]:
        """The number of intervals in which this happened, and how much longer than quiet ones they took together."""
        each = [interval for interval in self.disturbed if interval.happened == happened]
        usual = 1 / throughput(self.quiet)
        return len(each), sum(interval.seconds - interval.steps * usual for interval in each)

    def to_json(self) -> str:
        """Everything, for programs. Times are in seconds since the kills began."""
        settings = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _NO_SETTINGS}
        seconds = [each.seconds for each in self.rejoins if each.seconds is not None]
        quiet, disturbed = throughput(self.quiet), throughput(self.disturbed)
        whole: dict[str, Any] = {
            "thinwire": thinwire.__version__,
            "torch": torch.__version__,
            **settings,
            "seconds_without_kills": self.began - self.quiet_began,
            "seconds_with_kills": self.ended - self.began,
            "kills": len(self.rejoins),
            "relative_throughput": disturbed / quiet,
            "steps_per_second_without_kills": quiet,
            "steps_per_second_with_kills": disturbed,
            "share_of_deaths_and_joins": self.share_of_deaths_and_joins,
            "share_of_full_strength": self.share_of_full_strength,
            "outer_steps": max((step.number for life in self.lives for step in life.outer_steps), default=0),
            "divergences": [asdict(each) for each in self.divergences],
            "slowest_rejoin": max(seconds, default=None),
            "mean_rejoin": statistics.fmean(seconds) if seconds else None,
            "slowest_rejoin_with_a_core": self.slowest_rejoin,
            "longer_than_without_kills": {
                each: dict(zip(("intervals", "seconds"), self.extra_seconds(each), strict=True)) for each in HAPPENINGS
            },
            "misses": self.misses,
            "rejoins": [asdict(each) for each in self.rejoins],
        }
        lives = ",\n  ".join(json.dumps(each) for each in self._told())
        return f'{json.dumps(whole, indent=1)[:-2]},\n "lives": [\n  {lives}\n ]\n}}\n'

    def _told(self) -> Iterator[dict[str, Any]]:
        """Each life in short: its outer steps are rows."""
        for life in self.lives:
            yield {
                "host": life.host,
                "number": life.number,
                "started": round(life.started - self.began, 3),
                "imported": None if life.imported is None else round(life.imported - self.began, 3),
                "killed": None if life.killed is None else round(life.killed - self.began, 3),
                "columns": ["number", "at", "steps", "exchanging", "starved", "workers", "digest", "loss"],
                "outer_steps": [
                    [
                        *(step.number, round(step.at - self.began, 3), step.steps, round(step.exchanging, 3)),
                        *(round(step.starved, 3), step.workers, step.digest),
                        None if step.loss is None else round(step.loss, 4),
                    ]
                    for step in life.outer_steps
                ],
            }

    def write(self, path: Path) -> None:
        """Write everything to a file."""
        path.write_text(self.to_json(), encoding="utf-8")

    def print(self, console: Console) -> None:
        """The tables, and what must not have happened."""
        table = _table("Rejoins", ("host", "killed at", "steps lost", "rejoined after", "imports", "without a core"))
        for each in self.rejoins:
            table.add_row(
                *(str(each.host), f"{each.killed_at:.1f} s", str(each.lost_steps)),
                *(_seconds(each.seconds), _seconds(each.seconds_to_import), _seconds(each.seconds_starved)),
            )
        console.print(table)
        table = _table("Intervals of the living", ("what happened", "intervals", "longer by", "share of time"))
        total = sum(interval.seconds for interval in self.disturbed)
        for happened in HAPPENINGS:
            count, extra = self.extra_seconds(happened)
            table.add_row(happened, str(count), f"{extra / max(count, 1):.3f} s", f"{extra / total:.2%}")
        console.print(table)
        table = _table("Bars", ("what", "measured", "bar", "met"))
        ratio, diverged = self.relative_throughput, len(self.divergences)
        in_time = all(each.in_time for each in self.rejoins)
        rows = (
            ("throughput of the living", f"{ratio:.2%} of quiet", f"{LEAST_THROUGHPUT:.0%}", ratio >= LEAST_THROUGHPUT),
            ("divergences", str(diverged), "0", not diverged),
            ("slowest rejoin, with a core", _seconds(self.slowest_rejoin), f"{MOST_SECONDS_TO_REJOIN:g} s", in_time),
        )
        for what, measured, bar, met in rows:
            table.add_row(what, measured, bar, "[green]yes[/]" if met else "[bold red]no[/]")
        console.print(table)
        for miss in self.misses:
            console.print(miss, markup=False, highlight=False, soft_wrap=True)
        console.print(
            f"{len(self.rejoins)} kills in {(self.ended - self.began) / 60:.1f} minutes; "
            f"{throughput(self.quiet):.3f} inner steps per second and worker without kills, "
            f"{throughput(self.disturbed):.3f} with them; by the intervals with neither, deaths and joins have cost "
            f"{self.share_of_deaths_and_joins:.2%} of the time of the living; all hosts together took "
            f"{self.share_of_full_strength:.1%} of the steps of a run in which nobody dies",
            highlight=False,
        )


_NO_SETTINGS = ("lives", "quiet_began", "began", "ended")


def _since(began: float, ended: float | None) -> float | None:
    return None if ended is None else ended - began


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading.startswith("what") else "right", no_wrap=True)
    return table

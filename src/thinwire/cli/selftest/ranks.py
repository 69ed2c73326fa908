"""Parts of the test, run one after another in local ranks: what goes wrong in one ends it, and never the others.

All parts run in the same ranks, as starting them takes seconds. A part that raises in any rank, or takes too long, ends
the ranks; those that are left run in new ones.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from thinwire.cli.launch import Report, WorkerError, run_workers
from thinwire.cli.selftest.site import Site

START_SECONDS = 120.0
"""Within which ranks must have found their devices."""


@dataclass(frozen=True)
class Part:
    """Something to be run in all ranks."""

    name: str
    run: Callable[[Site], Any]
    """A function of some module; rank 0's result is the result."""
    seconds: float
    """How long it may take."""


@dataclass(frozen=True)
class Outcome:
    """What came of a part."""

    seconds: float
    result: Any = None
    error: str | None = None
    """Why there is no result."""


@dataclass(frozen=True)
class _Started:
    processes: list[int]


@dataclass(frozen=True)
class _Ready:
    pass


@dataclass(frozen=True)
class _Began:
    part: str


@dataclass(frozen=True)
class _Ended:
    part: str
    result: Any


def run_parts(
    device_type: str, ranks: int, parts: Sequence[Part], *, quick: bool, tell: Callable[[str], None]
) -> dict[str, Outcome]:
    """What came of each part, by its name; `tell` gets the name of a part when it begins."""
    outcomes: dict[str, Outcome] = {}
    while left := [part for part in parts if part.name not in outcomes]:
        watch = _Watch(left, tell)
        error = None
        try:
            run_workers(_work, ranks, (device_type, quick, tuple(left)), watch.hear)
        except WorkerError as failure:
            error = str(failure)
        finally:
            watch.rest()
        outcomes |= watch.done
        if error is not None:
            outcomes |= {name: Outcome(watch.seconds, error=watch.overdue or error) for name in watch.blamed()}
    return outcomes


def _work(report: Report, device_type: str, quick: bool, parts: Iterable[Part]) -> None:
    """Run on every rank."""
    processes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    report(_Started(processes))
    site = Site.here(device_type, quick=quick)
    report(_Ready())
    for part in parts:
        report(_Began(part.name))
        report(_Ended(part.name, part.run(site)))


class _Watch:
    """Hears of what ranks do, and ends them when they are too slow."""

    def __init__(self, parts: Sequence[Part], tell: Callable[[str], None]) -> None:
        self._parts = {part.name: part for part in parts}
        self._tell = tell
        self._processes: list[int] = []
        self._timer: threading.Timer | None = None
        self._ready = False
        self._part: str | None = None
        self._began = time.monotonic()
        self.done: dict[str, Outcome] = {}
        self.overdue: str | None = None
        """What took too long."""

    @property
    def seconds(self) -> float:
        """Since something has begun."""
        return time.monotonic() - self._began

    def hear(self, message: _Started | _Ready | _Began | _Ended) -> None:
        """A message of rank 0."""
        self.rest()
        if isinstance(message, _Started):
            self._processes = message.processes
            self._limit(START_SECONDS, "ranks have not found their devices")
        elif isinstance(message, _Ready):
            self._ready = True
        elif isinstance(message, _Began):
            self._part = message.part
            self._tell(message.part)
            self._limit(self._parts[message.part].seconds, "it has not ended")
        else:
            self._part = None
            self.done[message.part] = Outcome(self.seconds, message.result)

    def rest(self) -> None:
        """Forget the time limit."""
        if self._timer is not None:
            self._timer.cancel()

    def blamed(self) -> list[str]:
        """Whose fault it is that ranks have failed."""
        left = [name for name in self._parts if name not in self.done]
        if not self._ready:
            return left
        if self._part is not None:
            return [self._part]
        # Between two parts it is the next one's, and after all of them the last one's: somebody must be named.
        return left[:1] or list(self._parts)[-1:]

    def _limit(self, seconds: float, complaint: str) -> None:
        self._began = time.monotonic()
        self._timer = threading.Timer(seconds, self._end, (f"{complaint} within {seconds:g} s",))
        self._timer.daemon = True
        self._timer.start()

    def _end(self, complaint: str) -> None:
        # run_workers waits for its processes and not for the time: it hears of the time when they are gone.
        self.overdue = complaint
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

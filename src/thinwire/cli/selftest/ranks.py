"""Run the parts of the self-test in local ranks. A part that fails does not stop the others.

All parts run in the same ranks, because starting ranks takes seconds. If a part raises in any rank, or takes too long,
all ranks are ended, and the remaining parts run in new ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.cli.launch import Report, local_ranks
from thinwire.cli.selftest.site import Site
from thinwire.testbed.supervisor import ChildError, Supervisor

START_SECONDS = 300.0
"""How long ranks may take to start and to find their devices."""


@dataclass(frozen=True)
class Part:
    """One part of the self-test, run in all ranks."""

    name: str
    run: Callable[[Site], Any]
    """Importable by its name. The result of rank 0 is the result of the part."""
    seconds: float
    """How long it may take."""


@dataclass(frozen=True)
class PartOutcome:
    """The result of a part, or the reason why it has none."""

    seconds: float
    result: Any = None
    error: str | None = None


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
    device_type: str, ranks: int, parts: Sequence[Part], *, quick: bool, on_begin: Callable[[str], None]
) -> dict[str, PartOutcome]:
    """The outcome of each part, by its name; `on_begin` gets the name of a part when it begins."""
    outcomes: dict[str, PartOutcome] = {}
    while left := [part for part in parts if part.name not in outcomes]:
        progress = _Progress(left, on_begin)
        try:
            with local_ranks(_work, ranks, (device_type, quick, tuple(left))) as group:
                progress.follow(group)
        except (ChildError, TimeoutError) as error:
            outcomes |= {name: PartOutcome(progress.seconds, error=str(error)) for name in progress.blamed()}
        outcomes |= progress.done
    return outcomes


def _work(report: Report, device_type: str, quick: bool, parts: Iterable[Part]) -> None:
    """Run on every rank."""
    site = Site.here(device_type, quick=quick)
    report(_Ready())
    for part in parts:
        report(_Began(part.name))
        report(_Ended(part.name, part.run(site)))


class _Progress:
    """How far the ranks are, by the messages of rank 0."""

    def __init__(self, parts: Sequence[Part], on_begin: Callable[[str], None]) -> None:
        self._parts = {part.name: part for part in parts}
        self._on_begin = on_begin
        self._ready = False
        self._part: str | None = None
        self._began = time.monotonic()
        self.done: dict[str, PartOutcome] = {}

    @property
    def seconds(self) -> float:
        """Since the current part began."""
        return time.monotonic() - self._began

    def follow(self, group: Supervisor) -> None:
        """Receive messages until all ranks are done.

        Raises:
            ChildError: when a rank fails.
            TimeoutError: when the start or a part takes too long.
        """
        limit, complaint = START_SECONDS, "ranks have not found their devices"
        while not group.finished:
            for _, message in group.messages(limit - self.seconds):
                self._take(message)
                self._began = time.monotonic()
                limit, complaint = START_SECONDS, "the next part has not begun"
                if self._part is not None:
                    limit, complaint = self._parts[self._part].seconds, "it has not ended"
            if self.seconds > limit and not group.finished:
                raise TimeoutError(f"{complaint} within {limit:g} s")

    def _take(self, message: _Ready | _Began | _Ended) -> None:
        if isinstance(message, _Ready):
            self._ready = True
        elif isinstance(message, _Began):
            self._part = message.part
            self._on_begin(message.part)
        else:
            self._part = None
            self.done[message.part] = PartOutcome(self.seconds, message.result)

    def blamed(self) -> list[str]:
        """The parts to which a failure of the ranks belongs."""
        left = [name for name in self._parts if name not in self.done]
        if not self._ready:
            return left
        if self._part is not None:
            return [self._part]
        # Between two parts it belongs to the next one, and after all of them to the last one.
        return left[:1] or list(self._parts)[-1:]

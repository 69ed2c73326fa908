"""A discrete event simulation: a clock, a heap of events, and processes that wait for signals.

A process is a generator. What it yields is a `Signal`, and it continues when the signal fires. Nothing sleeps: the
clock jumps from event to event. Events at the same time run in the order in which they were scheduled, so a simulation
gives the same result every time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator


class Signal:
    """Something that happens once. `count` events must be reported before it fires."""

    __slots__ = ("_missing", "_waiting")

    def __init__(self, count: int = 1) -> None:
        self._missing = count
        self._waiting: list[Callable[[], None]] = []

    @property
    def fired(self) -> bool:
        """Whether it has happened."""
        return self._missing <= 0

    def report(self, count: int = 1) -> None:
        """Report some of its events. It fires with the last one."""
        if self._missing <= 0:
            return
        self._missing -= count
        if self._missing <= 0:
            waiting, self._waiting = self._waiting, []
            for resume in waiting:
                resume()

    def then(self, resume: Callable[[], None]) -> None:
        """Call a function when it has fired, at once if it has."""
        if self._missing <= 0:
            resume()
        else:
            self._waiting.append(resume)


class Arrivals(Signal):
    """Messages of which all must have arrived. Only the last one is an event: there may be a million of them."""

    __slots__ = ("_latest", "_under_way")

    def __init__(self, count: int) -> None:
        super().__init__(1 if count else 0)
        self._under_way = count
        self._latest = 0.0

    def expect(self, simulation: Simulation, time: float, count: int) -> None:
        """So many of the messages arrive at this time."""
        self._under_way -= count
        self._latest = max(self._latest, time)
        if self._under_way == 0:
            simulation.at(self._latest, self.report)


Process = Generator[Signal, None, None]


class Simulation:
    """The clock and the events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Call a function at a time, which must not have passed."""
        self._scheduled += 1
        heapq.heappush(self._events, (max(time, self.now), self._scheduled, call))

    def start(self, process: Process) -> Signal:
        """Run a process until it waits. Returns the signal of its end."""
        ended = Signal()

        def resume() -> None:
            for signal in process:
                if not signal.fired:
                    signal.then(resume)
                    return
            ended.report()

        resume()
        return ended

    def run(self) -> None:
        """Run all events, in the order of time."""
        events, pop = self._events, heapq.heappop
        while events:
            self.now, _, call = pop(events)
            call()


class Processor:
    """Cores that run tasks: each task uses at most one core, and tasks share the cores equally when there are more.

    Linux shares cores in the same way between runnable threads, in time slices of a few milliseconds.

    Args:
        simulation: the clock.
        cores: how many there are; infinitely many if no task ever waits for one.
    """

    def __init__(self, simulation: Simulation, cores: float) -> None:
        self._simulation = simulation
        self._cores = cores
        # All tasks advance at the same speed. So a task ends when the work that each task has been given since the
        # beginning reaches what it was when the task began, plus the task's own work.
        self._given = 0.0
        self._updated = 0.0
        self._tasks: list[tuple[float, int, Signal]] = []
        self._started = 0
        self._plans = 0

    def work(self, seconds: float) -> Signal:
        """Start a task that takes so many seconds of a core. Returns the signal of its end."""
        done = Signal()
        if seconds <= 0:
            done.report()
            return done
        if self._cores == math.inf:
            self._simulation.at(self._simulation.now + seconds, done.report)
            return done
        self._advance()
        self._started += 1
        heapq.heappush(self._tasks, (self._given + seconds, self._started, done))
        self._plan()
        return done

    @property
    def _speed(self) -> float:
        return min(1.0, self._cores / len(self._tasks)) if self._tasks else 1.0

    def _advance(self) -> None:
        now = self._simulation.now
        self._given += (now - self._updated) * self._speed
        self._updated = now

    def _plan(self) -> None:
        """Schedule the end of the task that ends first. A later plan makes earlier ones void."""
        self._plans += 1
        plan = self._plans
        if self._tasks:
            left = max(0.0, self._tasks[0][0] - self._given)
            self._simulation.at(self._simulation.now + left / self._speed, lambda: self._finish(plan))

    def _finish(self, plan: int) -> None:
        if plan != self._plans:
            return
        self._advance()
        # Rounding must not leave a task with a rest that takes no time.
        self._given = max(self._given, self._tasks[0][0])
        finished: list[Signal] = []
        while self._tasks and self._tasks[0][0] <= self._given:
            finished.append(heapq.heappop(self._tasks)[2])
        self._plan()
        for done in finished:
            done.report()

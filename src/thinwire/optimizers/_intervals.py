"""When 0/1 Adam updates its variance, and when its workers synchronise: functions of the step's number alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator


def variance_steps(scaler: int, last: int) -> frozenset[int]:
    """The steps up to `last` that update the variance: `scaler` in a row, as many two steps apart, and so on."""
    return frozenset(itertools.takewhile(lambda step: step <= last, _variance_steps(scaler)))


def _variance_steps(scaler: int) -> Iterator[int]:
    step, apart = 0, 1
    while True:
        for _ in range(scaler):
            step += apart
            yield step
        apart *= 2


def local_interval(since_freeze: int, scaler: int, clipper: int) -> int:
    """How many steps apart workers synchronise, at the step that is so many after the freeze, counted from 1."""
    doublings = (since_freeze - 1) // scaler
    # Beyond this many doublings any clipper has been reached.
    return min(2 ** min(doublings, 62), clipper)


def synchronises(since_freeze: int, scaler: int, clipper: int) -> bool:
    """Whether that step is one at which workers synchronise."""
    return since_freeze % local_interval(since_freeze, scaler, clipper) == 0

"""Which cases of crossed parameters the short suite runs.

A test of kernels with several `parametrize` marks is a grid: dtypes × modes × backends and so on. `make test-all` runs
all of it. `make test` runs a sample in which every value of every mark occurs; the other cases are marked `long`. The
sample depends on nothing but the test, so all machines and processes choose the same one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

Value = tuple[str, str]
"""The names of a mark's parameters, and one of its values."""


def sample(cases: list[pytest.Function]) -> list[pytest.Function]:
    """The cases of a test that the short suite runs: all of them unless parameters are crossed."""
    values = {case.nodeid: _values(case) for case in cases}
    if max(len({mark for mark, _ in of_case}) for of_case in values.values()) < 2:
        return cases
    covered = {case.nodeid: _covered(case, values[case.nodeid]) for case in cases}
    left = set().union(*covered.values())
    shuffled = sorted(cases, key=lambda case: case.nodeid)
    random.Random(cases[0].originalname).shuffle(shuffled)
    chosen: list[pytest.Function] = []
    while left:
        chosen.append(max(shuffled, key=lambda case: len(left & covered[case.nodeid])))
        left -= covered[chosen[-1].nodeid]
    return chosen


def mark_long(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of kernel tests as `long` that the sample leaves out."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.path.name.startswith(("test_kernels", "test_triton")):
            tests.setdefault(f"{item.path}::{item.originalname}", []).append(item)
    for cases in tests.values():
        short = {case.nodeid for case in sample(cases)}
        for case in cases:
            if case.nodeid not in short:
                case.add_marker(pytest.mark.long)


def _values(case: pytest.Function) -> set[Value]:
    values: set[Value] = set()
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0]
        each = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        values.add((",".join(each), repr([case.callspec.params[name] for name in each])))
    return values


def _covered(case: pytest.Function, values: set[Value]) -> set[Value]:
    """What a case adds to a sample. With the reference it covers the reference only: the others are under test."""
    if "backend" in case.callspec.params and case.callspec.params["backend"] == "reference":
        return {value for value in values if value[0] == "backend"}
    return values

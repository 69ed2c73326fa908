"""Kernels with nothing to do do nothing: tables without runs, runs and tensors without elements, selections of none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.kernel_cases import allocation, copy_of, each_backend, kernels_of
from tests.unit.test_kernels_table import OF_TRITON, SMALL_CASES
from thinwire.kernels import ops
from thinwire.kernels.modes import Gate

WITH_RUNS = [operation for operation in ops.OPERATIONS if "runs" in SMALL_CASES[operation]]
each_with_runs = pytest.mark.parametrize("operation", WITH_RUNS)
KEPT = {
    "rows",
    "coefficients",
    "table",
    "signal",
    "status",
    "to",
    "also",
    "sent_scales",
    "answer_scales",
    "scales",
    "last_scales",
    "previous_scales",
}
"""Tensors that are not the longer for more elements. A shard without elements has a scale."""


def emptied(operation: str) -> dict[str, Any]:
    """All tensors of a case without elements, whose memory begins nowhere; `sums` are as many as runs."""
    case = {name: copy_of(argument) for name, argument in SMALL_CASES[operation].items()}
    for name, argument in case.items():
        if isinstance(argument, Tensor) and name not in {*KEPT, "runs", "sums", "ranges"}:
            case[name] = torch.empty(0, dtype=argument.dtype)
    return case


def without_runs(operation: str) -> dict[str, Any]:
    case = emptied(operation)
    case["runs"] = torch.empty(0, 6, dtype=torch.int64)
    if "sums" in case:
        case["sums"] = torch.empty(0, dtype=torch.float64)
    return case


def with_empty_runs(operation: str) -> dict[str, Any]:
    case = emptied(operation)
    case["runs"] = torch.tensor([[0, 0, 0, 0, 0, 1], [640, 64, 0, 88, 8, 1]])
    case["shift"] = 0
    if "shift" not in SMALL_CASES[operation]:
        del case["shift"]
    if "sums" in case:
        sums = case["sums"]
        case["sums"] = torch.full((2, *sums.shape[1:]), -7.0, dtype=torch.float64)
    return case


def call(backend: str, operation: str, case: dict[str, Any]) -> Any:
    if backend != "triton":
        with kernels_of(backend) as kernels:
            return getattr(kernels, operation)(**case)
    pytest.importorskip("triton")
    bad, more = torch.zeros(1, dtype=torch.int32), {}
    if operation in ops.FINDING:
        more = {"bad": bad}
    elif operation in ops.STEPPING:
        more = {"gate": Gate(torch.ones(1, dtype=torch.int32))}
    result = getattr(ops.BACKENDS["triton"], operation)(**case, **more)
    return bool(bad) if operation in ops.FINDING else result


def assert_nothing_happens(backend: str, operation: str, case: dict[str, Any]) -> None:
    before = {name: allocation(argument).clone() for name, argument in case.items() if isinstance(argument, Tensor)}
    result = call(backend, operation, case)
    assert result is None or float(result) == 0.0
    for name, memory in before.items():
        if name == "sums":
            assert not bool(case["sums"].any())
        else:
            assert torch.equal(allocation(case[name]), memory), name


@each_backend
@each_with_runs
def test_a_table_without_runs(backend: str, operation: str) -> None:
    assert_nothing_happens(backend, operation, without_runs(operation))


@each_backend
@each_with_runs
def test_runs_without_elements(backend: str, operation: str) -> None:
    assert_nothing_happens(backend, operation, with_empty_runs(operation))


@each_with_runs
def test_a_triton_table_without_runs(operation: str) -> None:
    if operation in OF_TRITON:
        assert_nothing_happens("triton", operation, without_runs(operation))
        assert_nothing_happens("triton", operation, with_empty_runs(operation))


EMPTY: dict[str, dict[str, Any]] = {
    "mean": {"rows": torch.empty(3, 0), "out": torch.empty(0)},
    "square_sum": {"values": torch.empty(0)},
    "precondition": {"v": torch.empty(0)},
    "crc32c": {"data": torch.empty(0, dtype=torch.uint8)},
    "activity_refresh": {"state": torch.empty(0), "packets": torch.empty(0, 48, dtype=torch.uint8), "shards": 0},
    "activity_update": {
        "active": torch.empty(0, dtype=torch.int64),
        "answers": torch.empty(0, 300, dtype=torch.uint8),
        "first_word": 0,
    },
    "vote_bit": {"words": 0, "answer": torch.empty(0, dtype=torch.uint8), "answer_byte": 0},
    "vote_majority": {"words": 0, "answer": torch.empty(0, dtype=torch.uint8), "answer_byte": 0},
    "vote_count": {"words": 0, "answer": torch.empty(0, dtype=torch.uint8), "answer_byte": 0},
    "top_k": {"indices": torch.empty(0, dtype=torch.int32), "scratch": torch.empty(0, dtype=torch.int64)},
    "sparse_add": {"indices": torch.empty(0, dtype=torch.int32), "amounts": torch.empty(0)},
    "sketch_add": {"values": torch.empty(0)},
    "sketch_estimate": {"values": torch.empty(0)},
    "sketch_top_k": {"indices": torch.empty(0, dtype=torch.int32), "scratch": torch.empty(0, dtype=torch.int64)},
    "sparse_amsgrad": {
        "x": torch.empty(0),
        "low": None,
        "v": torch.empty(0),
        "peak": torch.empty(0),
        "indices": torch.empty(0, dtype=torch.int32),
        "momenta": torch.empty(0),
        "gradients": torch.empty(0),
    },
    "clear_words": {"words": torch.empty(0, dtype=torch.bool)},
}


@pytest.mark.parametrize("operation", EMPTY)
@each_backend
def test_tensors_without_elements(backend: str, operation: str) -> None:
    case = {name: copy_of(argument) for name, argument in SMALL_CASES[operation].items()} | EMPTY[operation]
    before = {name: allocation(argument).clone() for name, argument in case.items() if isinstance(argument, Tensor)}
    result = call(backend, operation, case)
    assert result is None or float(result) == (1.0 if operation == "sparse_add" else 0.0)
    for name, memory in before.items():
        assert torch.equal(allocation(case[name]), memory), name


@pytest.mark.parametrize("operation", [name for name in EMPTY if name in OF_TRITON])
def test_tensors_without_elements_on_triton(operation: str) -> None:
    case = {name: copy_of(argument) for name, argument in SMALL_CASES[operation].items()} | EMPTY[operation]
    before = {name: allocation(argument).clone() for name, argument in case.items() if isinstance(argument, Tensor)}
    result = call("triton", operation, case)
    assert result is None or float(result) == 0.0
    for name, memory in before.items():
        assert torch.equal(allocation(case[name]), memory), name


NOTHING_TO_SELECT_FROM: list[tuple[str, dict[str, Any]]] = [
    ("top_k", {"values": torch.empty(0)}),
    ("sketch_top_k", {"ranges": torch.empty(0, 2, dtype=torch.int64), "peak": torch.empty(0)}),
    ("sketch_top_k", {"ranges": torch.zeros(3, 2, dtype=torch.int64), "peak": torch.empty(0)}),
]


@pytest.mark.parametrize(("operation", "nothing"), NOTHING_TO_SELECT_FROM, ids=["values", "no ranges", "empty ranges"])
@each_backend
def test_nothing_is_selected_from_nothing(backend: str, operation: str, nothing: dict[str, Any]) -> None:
    none = {"indices": torch.empty(0, dtype=torch.int32), "scratch": torch.empty(0, dtype=torch.int64)}
    call(backend, operation, {**SMALL_CASES[operation], **nothing, **none})


@each_backend
def test_an_empty_range_among_others_changes_nothing(backend: str) -> None:
    case = {name: copy_of(argument) for name, argument in SMALL_CASES["sketch_top_k"].items()}
    call(backend, "sketch_top_k", case)
    expected = case["indices"].clone()
    ranges = case["ranges"]
    between = torch.tensor([[int(ranges[1, 0]), 0]])
    call(backend, "sketch_top_k", case | {"ranges": torch.cat([between[:0], ranges[:1], between, ranges[1:]])})
    assert torch.equal(case["indices"], expected)

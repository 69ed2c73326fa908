"""Kernels that take raw memory refuse tensors that are not what they think: an exception, never a crash.

A length is checked from both sides. The shortest tensor that a kernel accepts lies in an allocation of its own here, so
that under `make sanitize` a bound that is one element too low is a report of AddressSanitizer, and without it a write
beyond is seen in the bytes around the tensor.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.kernel_cases import allocation, copy_of, guarded
from tests.unit.test_kernels_table import OF_TORCH, OF_TRITON, SMALL_CASES
from thinwire.kernels import ops
from thinwire.kernels.modes import Gate

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TABLES = {"runs", "ranges", "which"}
GIVES_LENGTH = {
    "top_k": {"values", "indices"},
    "sketch_top_k": {"indices", "table"},
    "sparse_add": {"values", "indices"},
    "sketch_add": {"values", "table"},
    "sketch_estimate": {"values", "table"},
    "sparse_amsgrad": {"x", "indices"},
    "square_sum": {"values"},
    "precondition": {"v"},
    "crc32c": {"data"},
    "mean": {"rows"},
    "shard_scale": {"sums"},
    "clear_words": {"words"},
    "packet_seal": {"packets"},
    "packet_check": {"packets"},
}
"""Arguments whose length is the amount of work: shorter ones are accepted."""


def accepted(operation: str, name: str, case: dict[str, Any]) -> tuple[torch.dtype, ...]:
    """The dtypes that an argument can have."""
    if name == "grad" or (operation, name) == ("quantize_decode", "out"):
        return FLOATS
    if name in ("b", "c", "y", "state", "residual") and operation != "markov_difference":
        return (torch.float32, torch.bfloat16)
    if (operation, name) == ("mean", "rows"):
        return (torch.float32, torch.bfloat16)
    if name == "low":
        return (torch.bfloat16, torch.float16)
    return (case[name].dtype,)


def tensors_of(operation: str) -> list[str]:
    return [name for name, argument in SMALL_CASES[operation].items() if isinstance(argument, Tensor)]


NATIVE = [
    (operation, name) for operation in ops.OPERATIONS if operation not in OF_TORCH for name in tensors_of(operation)
]
ON_GPU = [(operation, name) for operation in OF_TRITON for name in tensors_of(operation)]


def call(backend: str, operation: str, case: dict[str, Any]) -> Any:
    more: dict[str, Any] = {}
    if backend == "triton":
        if operation in ops.FINDING:
            more = {"bad": torch.zeros(1, dtype=torch.int32)}
        elif operation in ops.STEPPING:
            more = {"gate": Gate(torch.ones(1, dtype=torch.int32))}
    return getattr(ops.BACKENDS[backend], operation)(**{**case, **more})


def assert_refused(backend: str, operation: str, name: str, wrong: Tensor, error: type[Exception]) -> None:
    """The exception names kernel and argument, and nothing was written."""
    case = {key: copy_of(argument) for key, argument in SMALL_CASES[operation].items()}
    before = {key: allocation(argument).clone() for key, argument in case.items() if isinstance(argument, Tensor)}
    with pytest.raises(error, match=rf"^{operation}: (the end of )?{name}\b.*expected"):
        call(backend, operation, case | {name: wrong})
    for key, memory in before.items():
        assert torch.equal(allocation(case[key]), memory), key


each_operation = pytest.mark.parametrize(
    ("backend", "operation"),
    list(dict.fromkeys([*(("native", pair[0]) for pair in NATIVE), *(("triton", pair[0]) for pair in ON_GPU)])),
)


def need_triton(backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")


@each_operation
def test_another_dtype_is_refused(backend: str, operation: str) -> None:
    need_triton(backend)
    case, all_dtypes = SMALL_CASES[operation], {*FLOATS, torch.float64, torch.int32, torch.int64, torch.uint8}
    for name in tensors_of(operation):
        for dtype in all_dtypes - {*accepted(operation, name, case)}:
            assert_refused(backend, operation, name, case[name].to(dtype), TypeError)


@each_operation
def test_a_tensor_that_torch_negates_is_refused(backend: str, operation: str) -> None:
    need_triton(backend)
    for name in tensors_of(operation):
        tensor = SMALL_CASES[operation][name]
        if tensor.dtype is not torch.bool:
            negated = torch._neg_view(tensor.clone())
            assert negated.is_neg()
            assert_refused(backend, operation, name, negated, ValueError)


@each_operation
def test_a_tensor_of_another_device_is_refused(backend: str, operation: str) -> None:
    need_triton(backend)
    for name in tensors_of(operation):
        elsewhere = torch.empty_like(SMALL_CASES[operation][name], device="meta")
        assert_refused(backend, operation, name, elsewhere, ValueError)


@each_operation
def test_memory_with_gaps_is_refused(backend: str, operation: str) -> None:
    need_triton(backend)
    for name in tensors_of(operation):
        tensor = SMALL_CASES[operation][name]
        if tensor.numel() > 1:  # one element has no gaps
            spread = tensor.repeat_interleave(2, dim=-1)[..., ::2]
            assert torch.equal(spread.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))
            assert_refused(backend, operation, name, spread, ValueError)


def in_rows(tensor: Tensor) -> bool:
    """Whether it has rows of packets, or of the scales of their blocks."""
    return tensor.dim() == 2 and (tensor.dtype is torch.uint8 or tensor.dtype is torch.float32)


def shortened(tensor: Tensor, length: int) -> Tensor:
    """So many elements of a tensor, or of each row where rows are apart, with nothing behind them."""
    if in_rows(tensor):
        return guarded(tensor[:, :length].contiguous())
    return guarded(tensor.flatten()[:length].clone())


def shortest(operation: str, name: str) -> int:
    """The length below which an argument is refused."""
    tensor = SMALL_CASES[operation][name]
    low, high = 0, tensor.shape[-1] if in_rows(tensor) else tensor.numel()
    while low < high:
        middle = (low + high) // 2
        case = {key: copy_of(argument) for key, argument in SMALL_CASES[operation].items()}
        try:
            call("native", operation, case | {name: shortened(tensor, middle)})
        except ValueError as error:
            assert re.match(rf"{operation}: {name}\b", str(error))  # noqa: PT017 - the length is what is looked for
            low = middle + 1
        else:
            high = middle
    return low


WITH_LENGTH = [pair for pair in NATIVE if pair[1] not in TABLES and pair[1] not in GIVES_LENGTH.get(pair[0], ())]


@pytest.mark.parametrize(("operation", "name"), WITH_LENGTH)
def test_a_tensor_that_is_one_element_too_short_is_refused(operation: str, name: str) -> None:
    tensor, length = SMALL_CASES[operation][name], shortest(operation, name)
    assert length > 0
    assert_refused("native", operation, name, shortened(tensor, length - 1), ValueError)
    if operation in OF_TRITON:
        pytest.importorskip("triton")
        assert_refused("triton", operation, name, shortened(tensor, length - 1), ValueError)
    # The shortest that is accepted is long enough: the same results, and nothing around it is touched.
    whole, exact = ({key: copy_of(argument) for key, argument in SMALL_CASES[operation].items()} for _ in range(2))
    exact[name] = shortened(tensor, length)
    around = allocation(exact[name]).clone()
    assert call("native", operation, exact) == call("native", operation, whole)
    for key, argument in whole.items():
        if isinstance(argument, Tensor) and key not in (name, "scratch"):
            assert torch.equal(allocation(exact[key]), allocation(argument)), key
    size = exact[name].numel() * exact[name].element_size()
    start = exact[name].storage_offset() * exact[name].element_size()
    after = allocation(exact[name])
    assert torch.equal(after[:start], around[:start])
    assert torch.equal(after[start + size :], around[start + size :])


@pytest.mark.parametrize("operation", [name for name in ops.OPERATIONS if "runs" in SMALL_CASES[name]])
def test_runs_that_are_changed_in_place_are_looked_at_again(operation: str) -> None:
    """The bounds of a table are computed once, but not for what it was."""
    case = {key: copy_of(argument) for key, argument in SMALL_CASES[operation].items()}
    call("native", operation, case)
    case["runs"][0, 2] += 64
    with pytest.raises(ValueError, match=rf"^{operation}: \w+ is .* expected"):
        call("native", operation, case)


@pytest.mark.parametrize("field", range(6))
def test_runs_with_a_negative_field_are_refused(field: int) -> None:
    case = {key: copy_of(argument) for key, argument in SMALL_CASES["birder_encode"].items()}
    case["runs"][0, field] = -64
    with pytest.raises(ValueError, match=r"^birder_encode: runs has a row with \w+=-64: expected"):
        call("native", "birder_encode", case)


def test_runs_are_rows_of_six() -> None:
    case = {key: copy_of(argument) for key, argument in SMALL_CASES["birder_encode"].items()}
    with pytest.raises(ValueError, match=r"^birder_encode: runs has the shape \(6,\): expected rows of 6"):
        call("native", "birder_encode", case | {"runs": case["runs"][0]})


def test_a_shift_beyond_the_first_element_is_refused() -> None:
    case = {key: copy_of(argument) for key, argument in SMALL_CASES["sign_encode"].items()}
    first = int(case["runs"][0, 0])
    with pytest.raises(ValueError, match=rf"^sign_encode: shift={first + 64}: expected at most {first}"):
        call("native", "sign_encode", case | {"shift": first + 64})


def test_a_table_made_in_inference_mode_serves() -> None:
    case = {key: copy_of(argument) for key, argument in SMALL_CASES["dense_encode"].items()}
    with torch.inference_mode():
        case["runs"] = case["runs"].clone()
    assert call("native", "dense_encode", case) == call("native", "dense_encode", case)


def test_memory_that_was_freed_is_refused() -> None:
    """As FSDP does with parameters that it has sharded."""
    case = {key: copy_of(argument) for key, argument in SMALL_CASES["dense_apply"].items()}
    case["x"].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"^dense_apply: x is .*, its memory freed: expected"):
        call("native", "dense_apply", case)


def test_parameters_are_walked_in_the_order_of_their_memory() -> None:
    """Transposed ones have no gaps, and are fine; a master in another order is not."""
    case: dict[str, Any] = {key: copy_of(argument) for key, argument in SMALL_CASES["step_apply"].items()}
    case["anchor"] = None
    expected = {key: copy_of(argument) for key, argument in case.items()}
    call("native", "step_apply", expected)
    x, low = case["x"].view(4, 25).t(), case["low"].view(4, 25).t()
    call("native", "step_apply", case | {"x": x, "low": low})
    assert torch.equal(case["x"], expected["x"])
    with pytest.raises(ValueError, match=r"^step_apply: low has the stride \(25, 1\): expected that of x, \(1, 25\)"):
        call("native", "step_apply", case | {"x": x, "low": case["low"].view(4, 25)})


NUMBERS: list[tuple[str, str, int]] = [
    ("activity_refresh", "period", 0),
    ("activity_refresh", "phase", 7),
    ("activity_refresh", "offset", -8),
    ("activity_refresh", "first_word", -1),
    ("activity_update", "period", 0),
    ("activity_update", "phase", -1),
    ("activity_update", "byte", -8),
    ("activity_update", "planes", 33),
    ("vote_bit", "byte", -8),
    ("vote_bit", "answer_byte", -8),
    ("vote_majority", "casting", 4),
    ("vote_majority", "casting", -1),
    ("vote_count", "planes", 33),
    ("vote_count", "words", -1),
    ("birder_apply", "planes", 0),
    ("sketch_add", "first", 2**31),
    ("sketch_estimate", "first", -64),
    ("crc32c", "crc", 2**32),
]


@pytest.mark.parametrize(("operation", "name", "value"), NUMBERS)
def test_numbers_that_lead_beyond_memory_are_refused(operation: str, name: str, value: int) -> None:
    case = {key: copy_of(argument) for key, argument in SMALL_CASES[operation].items()}
    with pytest.raises(ValueError, match=rf"^{operation}: {name}={value}: expected an integer from"):
        call("native", operation, case | {name: value})


def test_more_rows_than_a_sketch_has_room_for_are_refused() -> None:
    case = {key: copy_of(argument) for key, argument in SMALL_CASES["sketch_estimate"].items()}
    table, coefficients = torch.zeros(16, 50), torch.zeros(16, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^sketch_estimate: table has the shape \(16, 50\): expected 1 to 15 rows"):
        call("native", "sketch_estimate", case | {"table": table, "coefficients": coefficients})


@pytest.mark.parametrize("operation", ["top_k", "sketch_top_k"])
def test_more_than_there_are_cannot_be_selected(operation: str) -> None:
    case = {key: copy_of(argument) for key, argument in SMALL_CASES[operation].items()}
    indices, scratch = torch.zeros(104, dtype=torch.int32), torch.zeros(1 << 17, dtype=torch.int64)
    with pytest.raises(ValueError, match=rf"^{operation}: indices has 104 elements: expected at most 10[03]"):
        call("native", operation, case | {"indices": indices, "scratch": scratch})


@pytest.mark.parametrize("index", [-1, 2**31 - 1, 0])
def test_a_chosen_coordinate_outside_of_the_parameter_is_refused(index: int) -> None:
    case = {key: copy_of(argument) for key, argument in SMALL_CASES["sparse_amsgrad"].items()}
    case["indices"][-1] = index
    assert not 0 <= index - case["first"] < case["x"].numel()
    before = allocation(case["x"]).clone()
    for backend in ("native", "reference"):
        with pytest.raises(ValueError, match=r"^sparse_amsgrad: indices .* expected"):
            call(backend, "sparse_amsgrad", case)
    assert torch.equal(allocation(case["x"]), before)

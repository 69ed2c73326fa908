"""The one table, operation × backend: nothing is missing from it, and all backends give the same bits."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit import markov_cases, quantize_cases, sign_cases
from tests.unit import test_kernels as flat
from tests.unit import test_kernels_node as node
from tests.unit.kernel_cases import (
    REFERENCE,
    WORD,
    activity_refresh_case,
    allocation,
    copy_of,
    crc_case,
    encode_case,
    guarded,
    random,
    random_bytes,
    same_everywhere,
)
from thinwire.kernels import arguments, native, ops, reference
from thinwire.kernels.header import STATUS_WORDS
from thinwire.kernels.modes import Gate
from thinwire.kernels.native import library
from thinwire.kernels.native.binding import bind

each_operation = pytest.mark.parametrize("operation", ops.OPERATIONS)
OF_TRITON = [name for name, module in ops.BACKENDS_OF["triton"].items() if module == "triton"]


def packet_case() -> dict[str, Any]:
    """Packets without a header."""
    packets = guarded(random_bytes(3, 32 + 8 * 9, generator=random(0)))
    status = torch.zeros(STATUS_WORDS, dtype=torch.int64)
    return {"packets": packets, "status": guarded(status), "step": 5, "bucket": 2, "flags": 0, "layout": 77}


SMALL_CASES: dict[str, dict[str, Any]] = {
    "birder_encode": encode_case(100, seed=0, grad_dtype=torch.float32, state_dtype=torch.float32),
    "birder_direction": node.direction_case(100, seed=0, grad_dtype=torch.float32, state_dtype=torch.float32),
    "mean": node.mean_case(2, 100, seed=0, dtype=torch.float32),
    "activity_refresh": activity_refresh_case(3, 2, 1, 2, 1, 0, torch.float32),
    "vote_bit": flat.vote_case(3, 4, "some", seed=0),
    "vote_majority": flat.majority_case(4, 4, "some", seed=0),
    "vote_count": flat.count_case(3, 4, "some", seed=0),
    "activity_update": flat.activity_update_case(3, 2, 1, 2, 1, 0, planes=2),
    "birder_apply": flat.apply_case(100, seed=0),
    "dense_apply": node.dense_case(100, seed=0),
    **sign_cases.a_case_of_each(100, 1),
    **markov_cases.a_case_of_each(100),
    **quantize_cases.a_case_of_each(100),
    "crc32c": crc_case(100, seed=0),
    "shard_scale": {
        "sums": guarded(torch.rand(5, 3, dtype=torch.float64, generator=random(0))),
        "which": torch.tensor([0, 2, 3]),
        "to": guarded(torch.zeros(1)),
        "also": guarded(torch.zeros(1)),
        "length": 100,
    },
    "clear_words": {"state": guarded(torch.ones(10 * WORD)), "words": torch.tensor([False, True, True]), "first": 4},
    "packet_seal": packet_case() | {"sender": 1},
    "packet_check": packet_case() | {"senders": torch.arange(3)},
}


@each_operation
def test_native_kernels_agree_with_the_reference(operation: str) -> None:
    compare = markov_cases.same_selection if operation in markov_cases.SELECTIONS else same_everywhere
    compare(operation, **SMALL_CASES[operation])


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # NumPy's, as it interprets infinities
@pytest.mark.parametrize("operation", OF_TRITON)
def test_triton_kernels_agree_with_the_reference(operation: str) -> None:
    """Interpreted on the CPU; tests/unit/test_triton_*.py look closer."""
    pytest.importorskip("triton")
    case = SMALL_CASES[operation]
    ours, theirs = ({name: copy_of(argument) for name, argument in case.items()} for _ in range(2))
    expected = getattr(REFERENCE, operation)(**theirs)
    bad, more = torch.zeros(1, dtype=torch.int32), {}
    if operation in ops.FINDING:
        more = {"bad": bad}
    elif operation in ops.STEPPING:
        more = {"gate": Gate(torch.ones(1, dtype=torch.int32))}
    result = getattr(ops.BACKENDS["triton"], operation)(**ours, **more)
    if operation in ops.FINDING:
        assert result is None
        assert bool(bad) is expected
    else:
        assert (None if result is None else float(result)) == expected
    for name, argument in theirs.items():
        if isinstance(argument, Tensor):
            assert torch.equal(allocation(ours[name]), allocation(argument)), name


@pytest.mark.parametrize("backend", ops.BACKENDS_OF)
def test_every_backend_has_every_operation_and_takes_the_same_arguments(backend: str) -> None:
    pytest.importorskip("triton")
    for operation in ops.OPERATIONS:
        wanted = inspect.signature(getattr(REFERENCE, operation)).parameters
        taken = inspect.signature(getattr(ops.BACKENDS[backend], operation)).parameters
        on_device = {"bad"} if operation in ops.FINDING else {"gate"} if operation in ops.STEPPING else set()
        more = on_device if ops.BACKENDS_OF[backend][operation] == "triton" else set()
        # The function that computes checksums is an argument of the reference only.
        assert set(taken) - {"checksum"} == (set(wanted) - {"checksum"}) | more, operation
        assert [name for name in taken if name in wanted] == [name for name in wanted if name in taken], operation
        for name, parameter in wanted.items():
            if name != "checksum":
                expected = (parameter.kind, parameter.default)
                assert (taken[name].kind, taken[name].default) == expected, f"{operation}: {name}"


OF_TORCH = {"shard_scale", "clear_words", "packet_seal", "packet_check"}
"""Operations of the native backend that torch performs, without pointers."""
C_TYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "int32_t": torch.int32,
    "int64_t": torch.int64,
    "uint64_t": torch.int64,
    "uint8_t": torch.uint8,
}


def test_tensors_have_the_types_of_the_pointers_that_the_library_declares() -> None:
    """The names and number of all parameters follow from the declaration; types of memory are checked here."""
    assert set(native.declarations()) == {*ops.OPERATIONS} - OF_TORCH
    for operation, declaration in native.declarations().items():
        case = SMALL_CASES[operation]
        pointers = {one.name: one.type for one in declaration.parameters if one.is_pointer and one.name != "runs"}
        assert {name for name, value in case.items() if isinstance(value, Tensor)} - {"runs"} <= {*pointers}, operation
        for name, of in pointers.items():
            element = of.removeprefix("const ").removesuffix(" *")
            if element != "void" and case[name] is not None:
                assert case[name].dtype is C_TYPES[element], f"{operation}: {name} is {of}"


@pytest.mark.parametrize(
    ("declared", "error"),
    [
        (
            "int square_sum (const float *values, int64_t values_size, float weight)",
            "takes weight, which follows from no",
        ),
        ("double square_sum (const float *numbers, int64_t values_size)", "takes numbers, which follows from no"),
        ("double square_sum (const float *values, long values_size)", "expected one of the types"),
        ("double square_sum", "expected `result name"),
    ],
)
def test_a_declaration_that_the_reference_does_not_match_is_refused(declared: str, error: str) -> None:
    """Another library would otherwise be called with the wrong arguments, and write anywhere."""
    with pytest.raises(ImportError, match=error):
        bind(library.parse(declared)["square_sum"], reference.square_sum, arguments.square_sum, {})


@each_operation
def test_the_reference_makes_tensors_where_it_is_given_some(operation: str) -> None:
    """As on a GPU: with another default device, whatever is made without saying where meets what is on the CPU."""
    case = {name: copy_of(argument) for name, argument in SMALL_CASES[operation].items()}
    with torch.device("meta"):
        getattr(REFERENCE, operation)(**case)

"""The one table, operation × backend: nothing is missing from it, and all backends give the same bits."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit import markov_cases, sign_cases
from tests.unit import test_kernels as flat
from tests.unit import test_kernels_node as node
from tests.unit.kernel_cases import (
    REFERENCE,
    WORD,
    activity_refresh_case,
    allocation,
    crc_case,
    encode_case,
    guarded,
    random,
    random_bytes,
    same_everywhere,
    twin,
)
from thinwire.kernels import ops
from thinwire.kernels.header import STATUS_WORDS
from thinwire.kernels.modes import Gate

each_operation = pytest.mark.parametrize("operation", ops.OPERATIONS)
OF_TRITON = [name for name, module in ops.BACKENDS_OF["triton"].items() if module == "triton"]


def packet_case() -> dict[str, Any]:
    """Packets that nobody has sealed."""
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
    "activity_update": flat.adopt_case(3, 2, 1, 2, 1, 0, planes=2),
    "birder_apply": flat.apply_case(100, seed=0),
    "dense_apply": node.dense_case(100, seed=0),
    **sign_cases.a_case_of_each(100, 1),
    **markov_cases.a_case_of_each(100),
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
    ours, theirs = ({name: twin(argument) for name, argument in case.items()} for _ in range(2))
    expected = getattr(REFERENCE, operation)(**theirs)
    bad, more = torch.zeros(1, dtype=torch.int32), {}
    if operation in ops.FINDING:
        more = {"bad": bad}
    elif operation in ops.STEPPING:
        more = {"gate": Gate(torch.ones(1, dtype=torch.int32))}
    if operation == "sign_merge":
        ours["last_scale"] = torch.tensor([case["last_scale"]])
    result = getattr(ops.BACKENDS["triton"], operation)(**ours, **more)
    if operation in ops.FINDING:
        assert result is None
        assert bool(bad) is expected
    else:
        assert (None if result is None else float(result)) == expected
    for name, argument in theirs.items():
        if isinstance(argument, Tensor):
            assert torch.equal(allocation(ours[name]), allocation(argument)), name


@each_operation
@pytest.mark.parametrize("backend", ops.BACKENDS_OF)
def test_every_backend_has_every_operation_and_takes_the_same_arguments(backend: str, operation: str) -> None:
    pytest.importorskip("triton")
    home = ops.BACKENDS_OF[backend][operation]
    function = getattr(ops.BACKENDS[backend], operation)
    wanted = inspect.signature(getattr(REFERENCE, operation)).parameters
    taken = inspect.signature(function).parameters
    on_device = {"bad"} if operation in ops.FINDING else {"gate"} if operation in ops.STEPPING else set()
    more = on_device if home == "triton" else set()
    # By which function packets are summed up is the reference's own matter.
    assert set(taken) - {"checksum"} == (set(wanted) - {"checksum"}) | more
    for name, parameter in wanted.items():
        if name != "checksum":
            assert (taken[name].kind, taken[name].default) == (parameter.kind, parameter.default), name


@each_operation
def test_the_reference_makes_tensors_where_it_is_given_some(operation: str) -> None:
    """As on a GPU: with another default device, whatever is made without saying where meets what is on the CPU."""
    case = {name: twin(argument) for name, argument in SMALL_CASES[operation].items()}
    with torch.device("meta"):
        getattr(REFERENCE, operation)(**case)

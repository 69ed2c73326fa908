"""Signs with error memory, and what is done for a shard, on GPUs: every Triton kernel equals the reference to the bit.

Triton's interpreter runs them on the CPU (tests/conftest.py). A tile is 2,048 elements.
"""

from __future__ import annotations

import importlib
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.formulas import Places
from tests.unit.kernel_cases import (
    REFERENCE,
    WORD,
    allocation,
    copy_of,
    each_grad,
    each_low,
    each_state,
    guarded,
    hard_gradient,
    random,
)
from tests.unit.sign_cases import (
    GRADIENTS,
    moderate,
    momentum_encode_case,
    sign_apply_case,
    sign_encode_case,
    sign_merge_case,
    step_apply_case,
)
from thinwire.kernels.modes import Gate, Output
from thinwire.kernels.ops import FINDING

pytest.importorskip("triton")
arithmetic = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
"""Infinities and NaN are what the arithmetic is about; numpy, which is what the interpreter computes with, warns."""
pytestmark = arithmetic

TILE = 2048
TAILS = (1, 63, 64, 65, TILE, TILE + 1, 2 * TILE + 321)
OTHERS = 0b1010
"""Bits that other kernels have raised."""

each_output = pytest.mark.parametrize("output", list(Output), ids=["nothing", "signs", "floats"])
each_anchor = pytest.mark.parametrize("anchored", [False, True], ids=["", "anchored"])
each_momentum = pytest.mark.parametrize("with_momentum", [False, True], ids=["", "momentum"])
each_scale = pytest.mark.parametrize("on_device", [False, True], ids=["float", "tensor"])


def triton_kernel(operation: str) -> Any:
    return getattr(importlib.import_module("thinwire.kernels.triton"), operation)


def on_triton(operation: str, case: dict[str, Any], *, gate: Gate | None = None, scale_on_device: bool = False) -> Any:
    """Call a kernel as on a device; for one that finds numbers that are not finite, whether it has."""
    arguments = dict(case)
    if scale_on_device:
        arguments["scale"] = torch.tensor([case["scale"]])
    if gate is not None:
        arguments["gate"] = gate
    if operation not in FINDING:
        return triton_kernel(operation)(**arguments)
    bad = guarded(torch.tensor([OTHERS], dtype=torch.int32))
    assert triton_kernel(operation)(**arguments, bad=bad) is None
    assert int(bad) & ~1 == OTHERS
    return bool(int(bad) & 1)


def assert_same_memory(operation: str, got: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, argument in expected.items():
        if isinstance(argument, Tensor):
            wrong = (allocation(got[name]) != allocation(argument)).nonzero().flatten().tolist()
            assert not wrong, f"{operation}: {name} differs in {len(wrong)} bytes, first {wrong[:4]}"


def same_on_triton(operation: str, case: dict[str, Any], *, scale_on_device: bool = False, gated: bool = False) -> Any:
    """Calls an operation of the reference, in place, and of Triton on copies of everything, and compares all memory.

    `gated`: through a gate, which is open.
    """
    copy = {name: copy_of(argument) for name, argument in case.items()}
    gate = Gate(torch.tensor([0, 0, 7, 0], dtype=torch.int32), 2) if gated else None
    expected = getattr(REFERENCE, operation)(**case)
    result = on_triton(operation, copy, gate=gate, scale_on_device=scale_on_device)
    if isinstance(expected, float):
        assert result.dtype == torch.float64
        assert result.ndim == 0
        assert struct.pack("<d", float(result)) == struct.pack("<d", expected)
    else:
        assert result is expected
    assert_same_memory(operation, copy, case)
    return expected


def assert_closed(operation: str, case: dict[str, Any]) -> Any:
    """Behind a closed gate nothing is written."""
    copy = {name: copy_of(argument) for name, argument in case.items()}
    result = on_triton(operation, copy, gate=Gate(torch.tensor([1, 0, 1], dtype=torch.int32), 1))
    assert_same_memory(operation, copy, case)
    return result


# A worker's signs ----------------------------------------------------------------------------------------------------


@each_state
@each_grad
def test_sign_encode_for_every_tail(grad_dtype: torch.dtype | None, state_dtype: torch.dtype) -> None:
    for seed, count in enumerate(TAILS):
        case = sign_encode_case(count, seed=seed, grad_dtype=grad_dtype, state_dtype=state_dtype, pieces=1 + seed % 3)
        assert same_on_triton("sign_encode", case) is False


@each_state
@each_scale
@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
def test_sign_encode_with_gradients_that_are_not_finite(
    state_dtype: torch.dtype, grad_dtype: torch.dtype, on_device: bool
) -> None:
    case = sign_encode_case(
        TILE + 70, seed=7, grad_dtype=grad_dtype, state_dtype=state_dtype, finite=False, grad_off=3, scale=0.3, pieces=2
    )
    assert same_on_triton("sign_encode", case, scale_on_device=on_device) is True


@pytest.mark.parametrize("count", [1, 100, TILE])
def test_one_element_that_is_not_finite_is_enough(count: int) -> None:
    """Its gradient is left out. What stands behind the last gradient does not matter."""
    case = sign_encode_case(count, seed=1, grad_dtype=torch.float32, state_dtype=torch.float32)
    behind = case["grad"].as_strided((1,), (1,), case["grad"].storage_offset() + count)
    behind.fill_(torch.nan)
    assert same_on_triton("sign_encode", case) is False
    case["grad"][-1] = torch.inf
    assert same_on_triton("sign_encode", case) is True


@each_state
def test_sign_encode_of_huge_memories(state_dtype: torch.dtype) -> None:
    case = sign_encode_case(300, seed=1, grad_dtype=torch.float32, state_dtype=state_dtype, pieces=3, shift=WORD)
    case["c"][Places(case["runs"]).element - WORD] = hard_gradient(300, state_dtype, random(0))
    assert same_on_triton("sign_encode", case) is True
    assert bool(case["sums"].isinf().any())


@each_state
@each_output
@each_grad
def test_momentum_encode_for_every_tail(grad_dtype: torch.dtype | None, output: int, state_dtype: torch.dtype) -> None:
    for seed, count in enumerate((1, 64, 65, TILE + 130)):
        case = momentum_encode_case(
            count,
            seed=seed,
            output=output,
            grad_dtype=grad_dtype,
            state_dtype=state_dtype,
            pieces=1 + seed,
            shift=WORD * (seed % 5 > 0),
        )
        assert same_on_triton("momentum_encode", case) is False


@each_output
@each_scale
@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
def test_momentum_encode_with_gradients_that_are_not_finite(
    grad_dtype: torch.dtype, output: int, on_device: bool
) -> None:
    case = momentum_encode_case(
        TILE + 70,
        seed=7,
        output=output,
        grad_dtype=grad_dtype,
        state_dtype=torch.bfloat16,
        finite=False,
        grad_off=5,
        scale=-1.7,
    )
    assert same_on_triton("momentum_encode", case, scale_on_device=on_device) is True


# The owner's answer --------------------------------------------------------------------------------------------------


@each_state
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_sign_merge_for_every_tail(workers: int, state_dtype: torch.dtype) -> None:
    for seed, count in enumerate(TAILS):
        case = sign_merge_case(
            count, workers=workers, seed=seed, state_dtype=state_dtype, pieces=1 + seed % 3, shift=WORD * (seed % 5 > 0)
        )
        same_on_triton("sign_merge", case)


# Steps ---------------------------------------------------------------------------------------------------------------


@each_low
@each_anchor
@each_momentum
def test_sign_apply_for_every_tail(low_dtype: torch.dtype | None, anchored: bool, with_momentum: bool) -> None:
    for seed, count in enumerate((1, 63, 65, TILE, TILE + 130)):
        case = sign_apply_case(
            count,
            seed=seed,
            low_dtype=low_dtype,
            loaded=seed % 2 == 1,
            anchored=anchored,
            with_momentum=with_momentum,
            pieces=1 + seed % 3,
            x_off=seed % 3,
        )
        same_on_triton("sign_apply", case, gated=seed % 2 == 0)


@each_low
@each_anchor
def test_step_apply_for_every_tail(low_dtype: torch.dtype | None, anchored: bool) -> None:
    for seed, count in enumerate((1, 63, 65, TILE, TILE + 130)):
        case = step_apply_case(
            count,
            seed=seed,
            low_dtype=low_dtype,
            loaded=seed % 2 == 1,
            anchored=anchored,
            pieces=1 + seed % 3,
            x_off=seed % 3,
        )
        same_on_triton("step_apply", case, gated=seed % 2 == 0)


def test_behind_a_closed_gate_nothing_is_written() -> None:
    options: dict[str, Any] = {"seed": 1, "low_dtype": torch.bfloat16, "loaded": True, "anchored": True, "pieces": 2}
    assert_closed("sign_apply", sign_apply_case(TILE + 70, **options, with_momentum=True))
    assert_closed("step_apply", step_apply_case(TILE + 70, **options))


@pytest.mark.parametrize("operation", ["sign_encode", "sign_merge", "sign_apply", "step_apply", "momentum_encode"])
def test_no_runs_are_nothing_to_do(operation: str) -> None:
    cases: dict[str, dict[str, Any]] = {
        "sign_encode": sign_encode_case(70, seed=1, grad_dtype=torch.float32, state_dtype=torch.float32),
        "sign_merge": sign_merge_case(70, seed=1, workers=2, state_dtype=torch.float32),
        "sign_apply": sign_apply_case(70, seed=1),
        "step_apply": step_apply_case(70, seed=1),
        "momentum_encode": momentum_encode_case(
            70, seed=1, output=1, grad_dtype=torch.float32, state_dtype=torch.float32
        ),
    }
    same_on_triton(operation, cases[operation] | {"runs": torch.zeros(0, 6, dtype=torch.int64)})


# Shards --------------------------------------------------------------------------------------------------------------


def shard_scale_of(sums: Tensor, which: Tensor, length: int, *, twice: bool = True) -> None:
    """The same as the reference's."""
    case: dict[str, Any] = {"sums": guarded(sums), "which": guarded(which), "length": length}
    case |= {"to": guarded(torch.full((1,), -7.0)), "also": guarded(torch.full((), -7.0)) if twice else None}
    copy = {name: copy_of(argument) for name, argument in case.items()}
    REFERENCE.shard_scale(**case)
    triton_kernel("shard_scale")(**copy)
    assert_same_memory("shard_scale", copy, case)
    assert float(case["to"]) != -7.0


@pytest.mark.parametrize("twice", [False, True])
def test_shard_scale_is_the_root_of_the_mean_of_squares(twice: bool) -> None:
    for seed in range(8):
        sums = moderate(9, random(seed)).double().square().view(9, 1)
        which = torch.randperm(9, generator=random(seed))[: 1 + seed]
        shard_scale_of(sums, which, 1 + 977 * seed, twice=twice)


def test_shard_scale_is_the_mean_magnitude_of_active_elements() -> None:
    for seed in range(8):
        sums = moderate(27, random(seed)).double().abs().view(9, 3)
        sums[:, 2] = torch.randint(0, 9999, (9,), generator=random(seed)).double()
        shard_scale_of(sums, torch.randperm(9, generator=random(seed))[: 1 + seed], 0)


def test_the_scale_of_nothing_is_zero() -> None:
    rows = torch.tensor([1, 0])
    shard_scale_of(torch.zeros(2, 1, dtype=torch.float64), rows[:0], 0)
    shard_scale_of(torch.zeros(2, 1, dtype=torch.float64), rows, 100)
    shard_scale_of(torch.tensor([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0]], dtype=torch.float64), rows, 100)


@each_state
@pytest.mark.parametrize("words", [1, 31, 33, 70])
def test_clear_words_zeroes_what_is_marked(words: int, state_dtype: torch.dtype) -> None:
    generator = random(words)
    state = guarded(hard_gradient(WORD * (words + 5), state_dtype, generator, finite=False))
    marked = guarded(torch.rand(words, generator=generator) < 0.4)
    copy = copy_of(state)
    REFERENCE.clear_words(state, marked, first=3)
    triton_kernel("clear_words")(copy, copy_of(marked), first=3)
    assert torch.equal(allocation(copy), allocation(state))

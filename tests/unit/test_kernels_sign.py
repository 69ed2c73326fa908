"""Signs with error memory: every native kernel equals the reference to the bit, and both of them the formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.formulas import BFLOAT16, Array, Places, assert_sum, assert_sums, double, sign_of
from tests.unit.kernel_cases import (
    PATIENT,
    TAILS,
    WORD,
    allocation,
    each_backend,
    each_grad,
    each_low,
    each_state,
    hard_gradient,
    kernels_of,
    random,
    same_everywhere,
)
from tests.unit.sign_cases import (
    BETA,
    DECAY,
    GRADIENT,
    GRADIENTS,
    MEMORY,
    PARAMETER,
    RATE,
    RUNS,
    in_flat,
    momentum_encode_case,
    sign_apply_case,
    sign_encode_case,
    sign_merge_case,
    step_apply_case,
)

each_output = pytest.mark.parametrize("output", [0, 1, 2], ids=["nothing", "signs", "floats"])
each_anchor = pytest.mark.parametrize("anchored", [False, True], ids=["", "anchored"])
each_momentum = pytest.mark.parametrize("with_momentum", [False, True], ids=["", "momentum"])
WORKERS = (1, 2, 3, 4, 5, 7, 8, 16, 33)


def stored(dtype: torch.dtype) -> float:
    """How far a memory of that type may be from what was put into it."""
    return BFLOAT16 if dtype == torch.bfloat16 else 0.0


# A worker's signs ----------------------------------------------------------------------------------------------------


@each_state
@each_grad
def test_sign_encode_for_every_tail(grad_dtype: torch.dtype | None, state_dtype: torch.dtype) -> None:
    for seed, count in enumerate(TAILS):
        case = sign_encode_case(count, seed=seed, grad_dtype=grad_dtype, state_dtype=state_dtype)
        assert same_everywhere("sign_encode", **case) is False


@each_state
@each_grad
def test_sign_encode_for_many_runs_and_steps(grad_dtype: torch.dtype | None, state_dtype: torch.dtype) -> None:
    case = sign_encode_case(3000, seed=4, pieces=7, grad_dtype=grad_dtype, state_dtype=state_dtype)
    for step in range(4):
        if grad_dtype is not None:
            case["grad"] = hard_gradient(3000, grad_dtype, random(step))
        same_everywhere("sign_encode", **case)


@each_state
@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
def test_sign_encode_with_gradients_that_are_not_finite(state_dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    for count in (65, 4097):
        case = sign_encode_case(count, seed=count, grad_dtype=grad_dtype, state_dtype=state_dtype, finite=False)
        assert same_everywhere("sign_encode", **case) is True


@each_state
def test_sign_encode_of_huge_memories(state_dtype: torch.dtype) -> None:
    """No step makes them, but a checkpoint might bring them. Their squares are infinite."""
    case = sign_encode_case(1000, seed=1, grad_dtype=torch.float32, state_dtype=state_dtype, pieces=3)
    at = Places(case["runs"]).element
    case["c"][at] = hard_gradient(1000, state_dtype, random(0))
    assert same_everywhere("sign_encode", **case) is True
    assert bool(case["sums"].isinf().any())


@PATIENT
@given(**RUNS, **GRADIENT, state_dtype=MEMORY, beta=BETA, weight=st.floats(0, 10), shifted=st.booleans())
def test_sign_encode_whatever_it_is_given(seed: int, shifted: bool, **case: Any) -> None:
    same_everywhere("sign_encode", **sign_encode_case(seed=seed, shift=shifted * (seed % 5) * WORD, **case))


@each_backend
@each_state
@each_grad
def test_sign_encode_is_the_formula(backend: str, state_dtype: torch.dtype, grad_dtype: torch.dtype | None) -> None:
    case = sign_encode_case(
        500, seed=3, pieces=4, grad_dtype=grad_dtype, state_dtype=state_dtype, shift=2 * WORD, scale=-0.3, weight=0.2
    )
    places = Places(case["runs"])
    at = places.element - 2 * WORD
    old = double(case["c"])[at]
    gradient = np.zeros(500) if grad_dtype is None else double(case["grad"])[places.in_param]
    with kernels_of(backend) as kernels:
        assert kernels.sign_encode(**case) is False
    new = double(case["c"])[at]
    assert_sum(
        new,
        old,
        -sign_of(old) * double(case["sent_scales"])[places.shard],
        0.9 * places.signs(case["answer_words"]) * double(case["answer_scales"])[places.shard],
        -0.3 * 0.2 * gradient,
        stored=stored(state_dtype),
    )
    np.testing.assert_array_equal(places.bits(case["packets"]), new >= 0)
    assert_sums(case["sums"], places.by_run(new**2))


@each_backend
@each_state
def test_the_sign_of_zero_is_positive(backend: str, state_dtype: torch.dtype) -> None:
    """Of both zeros: both in what is sent and in what is taken away as sent."""
    case = sign_encode_case(100, seed=0, grad_dtype=None, state_dtype=state_dtype)
    zeros = torch.tensor([0.0, -0.0], dtype=state_dtype).repeat(50)
    case["c"].copy_(in_flat(zeros, 0))
    case["sent_scales"][1:], case["answer_scales"][1:] = 0.0, 0.0
    places = Places(case["runs"])
    with kernels_of(backend) as kernels:
        kernels.sign_encode(**case)
        assert places.bits(case["packets"]).all()
        case["c"].copy_(in_flat(zeros, 0))
        kernels.sign_encode(**(case | {"sent_scales": torch.ones(3)}))
    assert bool((case["c"][:100] == -1).all())
    assert not places.bits(case["packets"]).any()


@each_backend
@each_state
@pytest.mark.parametrize("operation", ["sign_encode", "momentum_encode", "sign_merge"])
def test_a_shifted_memory_gives_what_the_whole_one_does(backend: str, state_dtype: torch.dtype, operation: str) -> None:
    """A slice stands as many elements before its place in the flat space as other ranks have of what precedes it."""
    make, options, memory = {
        "sign_encode": (sign_encode_case, {"grad_dtype": torch.float32}, "c"),
        "momentum_encode": (momentum_encode_case, {"grad_dtype": torch.float32, "output": 1}, "c"),
        "sign_merge": (sign_merge_case, {"workers": 3}, "y"),
    }[operation]
    options |= {"seed": 4, "pieces": 4, "state_dtype": state_dtype}
    whole, shifted = make(1500, **options), make(1500, **options, shift=4 * WORD)
    with kernels_of(backend) as kernels:
        getattr(kernels, operation)(**whole)
        getattr(kernels, operation)(**shifted)
    at = Places(whole["runs"]).element
    assert torch.equal(shifted[memory][at - 4 * WORD], whole[memory][at])
    packets = "answer" if operation == "sign_merge" else "packets"
    assert torch.equal(allocation(shifted[packets]), allocation(whole[packets]))
    assert torch.equal(shifted["sums"], whole["sums"])


# An owner's signs ----------------------------------------------------------------------------------------------------


@each_state
@pytest.mark.parametrize("workers", WORKERS)
def test_sign_merge_for_every_tail(workers: int, state_dtype: torch.dtype) -> None:
    for seed, count in enumerate(TAILS[:-1]):
        same_everywhere("sign_merge", **sign_merge_case(count, workers=workers, seed=seed, state_dtype=state_dtype))


@PATIENT
@given(**RUNS, workers=st.integers(1, 40), state_dtype=MEMORY, shifted=st.booleans())
def test_sign_merge_whatever_it_is_given(seed: int, shifted: bool, **case: Any) -> None:
    same_everywhere("sign_merge", **sign_merge_case(seed=seed, shift=shifted * (seed % 5) * WORD, **case))


@each_backend
@each_state
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_sign_merge_is_the_formula(backend: str, state_dtype: torch.dtype, workers: int) -> None:
    case = sign_merge_case(500, workers=workers, seed=3, pieces=4, state_dtype=state_dtype, shift=2 * WORD)
    places = Places(case["runs"])
    at = places.element - 2 * WORD
    old = double(case["y"])[at]
    for row in range(workers):  # the kernel need not care for the padding of what it gets
        for _, _, count, byte, _, _ in places.runs:
            case["rows"][row, byte + count // 8 : byte + 8 * -(-count // WORD)] = 0
    scales = double(case["scales"]).reshape(workers, -1)[:, places.shard]
    sent_words = [np.where(places.bits(row), s, -s) for row, s in zip(case["rows"], scales, strict=True)]
    with kernels_of(backend) as kernels:
        kernels.sign_merge(**case)
    new = double(case["y"])[at]
    terms = [old, -sign_of(old) * double(case["last_scales"])[places.shard], *(row / workers for row in sent_words)]
    assert_sum(new, *terms, stored=stored(state_dtype))
    np.testing.assert_array_equal(places.bits(case["answer"]), new >= 0)
    assert_sums(case["sums"], places.by_run(new**2))


# A step by signs -----------------------------------------------------------------------------------------------------


@each_low
@each_anchor
@each_momentum
def test_sign_apply_for_every_tail(low_dtype: torch.dtype | None, anchored: bool, with_momentum: bool) -> None:
    for seed, count in enumerate(TAILS):
        case = sign_apply_case(
            count,
            seed=seed,
            low_dtype=low_dtype,
            anchored=anchored,
            with_momentum=with_momentum,
            loaded=seed % 2 == 0,
            pieces=1 + seed % 3,
        )
        same_everywhere("sign_apply", **case)


@PATIENT
@given(
    **RUNS,
    **PARAMETER,
    anchored=st.booleans(),
    with_momentum=st.booleans(),
    rate=RATE,
    decay=DECAY,
    momentum=st.floats(-10, 10),
)
def test_sign_apply_whatever_it_is_given(**case: Any) -> None:
    same_everywhere("sign_apply", **sign_apply_case(**case))


@each_backend
@each_anchor
def test_sign_apply_is_the_formula(backend: str, anchored: bool) -> None:
    case = sign_apply_case(500, seed=3, pieces=4, anchored=anchored, with_momentum=True, rate=0.02)
    places = Places(case["runs"])
    p = double(case["p"].clamp_(max=1e6))[places.element]  # it would make much of what has vanished
    base = double(case["anchor"] if anchored else case["x"])[places.in_param]
    sent_words = places.signs(case["answer_words"]) * double(case["scales"])[places.shard]
    with kernels_of(backend) as kernels:
        kernels.sign_apply(**case)
    moves = p > 0
    assert_sum(double(case["x"])[places.in_param], np.where(moves, 0.99, 1.0) * base, -0.02 * sent_words * p * moves)
    assert_sum(double(case["m"])[places.element], 1.3 * sent_words)
    if anchored:
        np.testing.assert_array_equal(double(case["anchor"])[places.in_param], base)


# A worker's momentum -------------------------------------------------------------------------------------------------


@each_output
@each_state
@each_grad
def test_momentum_encode_for_every_tail(grad_dtype: torch.dtype | None, state_dtype: torch.dtype, output: int) -> None:
    for seed, count in enumerate(TAILS):
        case = momentum_encode_case(count, seed=seed, output=output, grad_dtype=grad_dtype, state_dtype=state_dtype)
        assert same_everywhere("momentum_encode", **case) is False


@each_output
@each_state
@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
def test_momentum_encode_with_gradients_that_are_not_finite(
    state_dtype: torch.dtype, grad_dtype: torch.dtype, output: int
) -> None:
    for count in (65, 4097):
        case = momentum_encode_case(
            count, seed=count, output=output, grad_dtype=grad_dtype, state_dtype=state_dtype, finite=False
        )
        assert same_everywhere("momentum_encode", **case) is True


@PATIENT
@given(
    **RUNS,
    **GRADIENT,
    output=st.integers(0, 2),
    state_dtype=MEMORY,
    beta=BETA,
    weight=st.floats(0, 10),
    rate=RATE,
    shifted=st.booleans(),
)
def test_momentum_encode_whatever_it_is_given(seed: int, shifted: bool, **case: Any) -> None:
    same_everywhere("momentum_encode", **momentum_encode_case(seed=seed, shift=shifted * (seed % 5) * WORD, **case))


@each_backend
@each_output
@each_state
@each_grad
def test_momentum_encode_is_the_formula(
    backend: str, state_dtype: torch.dtype, grad_dtype: torch.dtype | None, output: int
) -> None:
    case = momentum_encode_case(
        500, seed=3, pieces=4, output=output, grad_dtype=grad_dtype, state_dtype=state_dtype, scale=-0.3, rate=0.02
    )
    places = Places(case["runs"])
    at = places.element
    m, c = double(case["m"])[at], double(case["c"])[at]
    with kernels_of(backend) as kernels:
        assert kernels.momentum_encode(**case) is False
    m_new, c_new = double(case["m"])[at], double(case["c"])[at]
    left: list[Array] = [c, -sign_of(c) * double(case["sent_scales"])[places.shard]]
    if grad_dtype is None:
        np.testing.assert_array_equal(m_new, m)
        assert_sum(c_new, *left, stored=stored(state_dtype))
    else:
        assert_sum(m_new, 0.9 * m, -0.1 * 0.3 * double(case["grad"])[places.in_param])
        assert_sum(c_new, *left, 0.02 * m_new, stored=stored(state_dtype))
    if output == 1:
        np.testing.assert_array_equal(places.bits(case["packets"]), c_new >= 0)
        assert_sums(case["sums"], places.by_run(c_new**2))
    elif output == 2:
        np.testing.assert_array_equal(places.floats(case["packets"]), m_new)


# A local step --------------------------------------------------------------------------------------------------------


@each_low
@each_anchor
def test_step_apply_for_every_tail(low_dtype: torch.dtype | None, anchored: bool) -> None:
    for seed, count in enumerate(TAILS):
        case = step_apply_case(
            count, seed=seed, pieces=1 + seed % 3, low_dtype=low_dtype, anchored=anchored, loaded=seed % 2 == 0
        )
        same_everywhere("step_apply", **case)


@PATIENT
@given(**RUNS, **PARAMETER, anchored=st.booleans(), rate=RATE, decay=DECAY)
def test_step_apply_whatever_it_is_given(**case: Any) -> None:
    same_everywhere("step_apply", **step_apply_case(**case))


@each_backend
@each_low
@each_anchor
def test_step_apply_is_the_formula(backend: str, low_dtype: torch.dtype | None, anchored: bool) -> None:
    """The anchor is the parameter before the step, loaded weights included."""
    case = step_apply_case(500, seed=3, pieces=4, low_dtype=low_dtype, loaded=True, anchored=anchored, rate=0.02)
    places = Places(case["runs"])
    p = double(case["p"].clamp_(max=1e6))[places.element]  # it would make much of what has vanished
    x = case["x"]
    if low_dtype is not None:
        same = x.to(low_dtype).view(torch.int16) == case["low"].view(torch.int16)  # zeros have signs
        x = torch.where(same, x, case["low"].float())
    before = double(x)[places.in_param]
    with kernels_of(backend) as kernels:
        kernels.step_apply(**case)
    moves = p > 0
    step = -0.02 * places.floats(case["values"]) * p * moves
    assert_sum(double(case["x"])[places.in_param], np.where(moves, 0.99, 1.0) * before, step)
    if anchored:
        np.testing.assert_array_equal(double(case["anchor"])[places.in_param], before)
    if low_dtype is not None:
        assert torch.equal(case["low"], case["x"].to(low_dtype))

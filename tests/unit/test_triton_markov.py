"""Markov compression and AMSGrad on GPUs: Triton kernels equal the reference to the bit, as in test_triton_sign."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.formulas import Places
from tests.unit.kernel_cases import WORD, copy_of, each_grad, each_low, hard_gradient, random
from tests.unit.markov_cases import (
    amsgrad_case,
    each_activity,
    each_mode,
    each_momentum,
    each_source,
    markov_difference_case,
    markov_encode_case,
    markov_merge_case,
    momentum_sum_case,
)
from tests.unit.sign_cases import GRADIENTS
from tests.unit.test_triton_sign import (
    TAILS,
    TILE,
    arithmetic,
    assert_closed,
    assert_same_memory,
    each_scale,
    on_triton,
    same_on_triton,
)
from thinwire.kernels.modes import Gate, MarkovMode, Source

pytestmark = arithmetic

FEW = (1, 63, 64, 65, TILE + 130)


# Markov compression --------------------------------------------------------------------------------------------------


@each_mode
@each_momentum
@each_grad
def test_markov_encode_for_every_tail(grad_dtype: torch.dtype | None, momentum: bool, mode: int) -> None:
    for seed, count in enumerate(FEW):
        case = markov_encode_case(count, seed=seed, grad_dtype=grad_dtype, momentum=momentum, mode=mode)
        assert same_on_triton("markov_encode", case) is False


@each_activity
@each_momentum
def test_markov_encode_for_many_runs_and_steps(momentum: bool, active: str) -> None:
    case = markov_encode_case(TILE + 900, seed=4, pieces=4, momentum=momentum, active=active, shift=2 * WORD)
    for step in range(2):
        case["grad"] = hard_gradient(TILE + 900, torch.float32, random(step))
        same_on_triton("markov_encode", case)
        case["mode"] = MarkovMode.ACTIVATION


@each_mode
@each_momentum
@each_scale
@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
def test_markov_encode_with_gradients_that_are_not_finite(
    grad_dtype: torch.dtype, momentum: bool, mode: int, on_device: bool
) -> None:
    case = markov_encode_case(
        TILE + 70, seed=7, grad_dtype=grad_dtype, momentum=momentum, mode=mode, finite=False, grad_off=3, scale=0.3
    )
    assert same_on_triton("markov_encode", case, scale_on_device=on_device) is (mode != MarkovMode.REPLAY)


@each_mode
@each_momentum
def test_markov_encode_of_huge_memories(momentum: bool, mode: int) -> None:
    """They are reported with a gradient, and not without one."""
    case = markov_encode_case(300, seed=1, pieces=3, momentum=momentum, mode=mode, shift=WORD)
    case["known"][Places(case["runs"]).element - WORD] = hard_gradient(300, torch.float32, random(0))
    copy = {name: copy_of(argument) for name, argument in case.items()}
    assert same_on_triton("markov_encode", case) is (mode != MarkovMode.REPLAY)
    assert same_on_triton("markov_encode", copy | {"grad": None}) is False


@each_activity
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_markov_merge_for_every_tail(workers: int, active: str) -> None:
    for seed, count in enumerate(FEW):
        case = markov_merge_case(
            count, workers=workers, seed=seed, active=active, pieces=1 + seed % 3, shift=WORD * (seed % 5 > 0)
        )
        same_on_triton("markov_merge", case)


@each_momentum
@each_grad
def test_markov_difference_for_every_tail(grad_dtype: torch.dtype | None, momentum: bool) -> None:
    for seed, count in enumerate(FEW):
        case = markov_difference_case(count, seed=seed, grad_dtype=grad_dtype, momentum=momentum, pieces=1 + seed % 3)
        assert same_on_triton("markov_difference", case) is False


@each_momentum
@each_scale
@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
def test_markov_difference_with_gradients_that_are_not_finite(
    grad_dtype: torch.dtype, momentum: bool, on_device: bool
) -> None:
    case = markov_difference_case(
        TILE + 70, seed=6, grad_dtype=grad_dtype, momentum=momentum, finite=False, grad_off=1, scale=0.3, shift=WORD
    )
    assert same_on_triton("markov_difference", case, scale_on_device=on_device) is True


# AMSGrad -------------------------------------------------------------------------------------------------------------


@each_source
@each_low
def test_amsgrad_apply_for_every_tail(low_dtype: torch.dtype | None, source: int) -> None:
    for seed, count in enumerate(TAILS):
        case = amsgrad_case(
            count,
            seed=seed,
            source=source,
            low_dtype=low_dtype,
            loaded=seed % 2 == 1,
            pieces=1 + seed % 3,
            x_off=seed % 3,
        )
        same_on_triton("amsgrad_apply", case, gated=seed % 2 == 0)


def test_signs_without_a_step_for_every_tail() -> None:
    for seed, count in enumerate(TAILS):
        case = amsgrad_case(count, seed=seed, pieces=3, source=Source.SIGNS, steps=False)
        same_on_triton("amsgrad_apply", case)


def test_behind_a_closed_gate_signs_are_taken_in_all_the_same() -> None:
    case = amsgrad_case(TILE + 70, seed=1, pieces=2, source=Source.SIGNS, low_dtype=torch.bfloat16, loaded=True)
    told = {name: copy_of(argument) for name, argument in case.items()}
    same_on_triton("amsgrad_apply", case | dict.fromkeys(("x", "low", "m", "v", "peak")))
    assert on_triton("amsgrad_apply", told, gate=Gate(torch.zeros(1, dtype=torch.int32))) is None
    assert_same_memory("amsgrad_apply", told, case)


@pytest.mark.parametrize("source", [Source.STATE, Source.FLOATS])
def test_behind_a_closed_gate_nothing_is_written(source: int) -> None:
    case = amsgrad_case(TILE + 70, seed=1, pieces=2, source=source, low_dtype=torch.bfloat16, loaded=True)
    assert_closed("amsgrad_apply", case)


@each_grad
def test_momentum_sum_for_every_tail(grad_dtype: torch.dtype | None) -> None:
    for seed, count in enumerate(TAILS):
        case = momentum_sum_case(count, seed=seed, grad_dtype=grad_dtype, pieces=1 + seed % 3)
        assert same_on_triton("momentum_sum", case) is False


@each_scale
@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
def test_momentum_sum_with_gradients_that_are_not_finite(grad_dtype: torch.dtype, on_device: bool) -> None:
    case = momentum_sum_case(TILE + 70, seed=6, grad_dtype=grad_dtype, finite=False, grad_off=1, scale=-0.7, shift=WORD)
    assert same_on_triton("momentum_sum", case, scale_on_device=on_device) is True


def test_momentum_sum_of_huge_errors_without_a_gradient() -> None:
    case = momentum_sum_case(300, seed=1, grad_dtype=None, pieces=3)
    case["e"][Places(case["runs"]).element] = hard_gradient(300, torch.float32, random(0))
    assert same_on_triton("momentum_sum", case) is True


def test_a_huge_momentum_is_refused_even_where_an_error_makes_up_for_it() -> None:
    case = momentum_sum_case(100, seed=0, grad_dtype=torch.float32, beta=1.0, ratio=1.0)
    case["m"][7], case["e"][7] = 2.0**61, -(2.0**61)
    assert same_on_triton("momentum_sum", case) is True


@pytest.mark.parametrize(
    "operation", ["markov_encode", "markov_merge", "markov_difference", "amsgrad_apply", "momentum_sum"]
)
def test_no_runs_are_nothing_to_do(operation: str) -> None:
    cases: dict[str, dict[str, Any]] = {
        "markov_encode": markov_encode_case(70, seed=1),
        "markov_merge": markov_merge_case(70, seed=1, workers=2),
        "markov_difference": markov_difference_case(70, seed=1),
        "amsgrad_apply": amsgrad_case(70, seed=1, source=Source.STATE),
        "momentum_sum": momentum_sum_case(70, seed=1, grad_dtype=torch.float32),
    }
    same_on_triton(operation, cases[operation] | {"runs": torch.zeros(0, 6, dtype=torch.int64)})

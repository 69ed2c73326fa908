"""Adam's and LAMB's kernels on GPUs: every Triton kernel equals the reference to the bit, as in test_triton_sign."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.kernel_cases import REFERENCE, each_low, guarded
from tests.unit.sign_cases import (
    adam_case,
    lamb_apply_case,
    lamb_measure_case,
    moderate,
    onebit_lamb_case,
    precondition_case,
    random,
    square_sum_case,
)
from tests.unit.test_triton_sign import (
    TAILS,
    TILE,
    arithmetic,
    assert_closed,
    on_triton,
    same_on_triton,
)

pytestmark = arithmetic

either_gradient = pytest.mark.parametrize("by_sign", [False, True], ids=["floats", "signs"])


# Adam ----------------------------------------------------------------------------------------------------------------


@each_low
@either_gradient
@pytest.mark.parametrize("update_variance", [True, False], ids=["", "frozen"])
def test_adam_apply_for_every_tail(low_dtype: torch.dtype | None, by_sign: bool, update_variance: bool) -> None:
    for seed, count in enumerate(TAILS):
        case = adam_case(
            count,
            seed=seed,
            pieces=1 + seed % 3,
            by_sign=by_sign,
            low_dtype=low_dtype,
            loaded=seed % 2 == 1,
            x_off=seed % 3,
            update_variance=update_variance,
        )
        same_on_triton("adam_apply", case, gated=seed % 2 == 0)


@pytest.mark.parametrize("eps", [0.0, 1e-40])
def test_adam_apply_with_hardly_an_eps(eps: float) -> None:
    """Subnormal numbers are numbers."""
    for by_sign in (False, True):
        case = adam_case(500, seed=2, pieces=2, by_sign=by_sign, eps=eps, correction=1.0, beta1=0.0, rate=3.0)
        case["v"][: case["v"].numel() // 2] *= 1e-38
        same_on_triton("adam_apply", case)


@pytest.mark.parametrize("count", [1, 65, TILE + 1])
def test_padding_does_not_count_as_variance(count: int) -> None:
    """Its bits are some, as those of all words are, and its shard has a scale."""
    case = adam_case(count, seed=1, by_sign=True, beta2=0.5)
    case["v"].clamp_(max=1e-3)
    case["scales"].fill_(1.0)
    assert same_on_triton("adam_apply", case) < 0.6 * count


@either_gradient
def test_behind_a_closed_gate_nothing_is_written_and_the_sum_is_that_of_before(by_sign: bool) -> None:
    case = adam_case(TILE + 70, seed=1, pieces=3, by_sign=by_sign, low_dtype=torch.bfloat16, loaded=True)
    total = assert_closed("adam_apply", case)
    assert float(total) == REFERENCE.adam_apply(**(case | {"update_variance": False}))


def test_adam_apply_to_nothing_does_nothing() -> None:
    case = adam_case(70, seed=1) | {"runs": torch.zeros(0, 6, dtype=torch.int64)}
    assert same_on_triton("adam_apply", case) == 0.0


def test_precondition_for_every_tail() -> None:
    for seed, count in enumerate((0, *TAILS)):
        same_on_triton("precondition", precondition_case(count, seed=seed, elements_off=seed))


# LAMB ----------------------------------------------------------------------------------------------------------------


@each_low
@pytest.mark.parametrize("loaded", [False, True], ids=["", "loaded"])
def test_lamb_measure_for_every_tail(low_dtype: torch.dtype | None, loaded: bool) -> None:
    for seed, count in enumerate(TAILS):
        case = lamb_measure_case(
            count, seed=seed, low_dtype=low_dtype, loaded=loaded, pieces=1 + seed % 3, x_off=seed % 3
        )
        same_on_triton("lamb_measure", case)


@each_low
def test_lamb_apply_for_every_tail(low_dtype: torch.dtype | None) -> None:
    for seed, count in enumerate(TAILS):
        case = lamb_apply_case(count, seed=seed, low_dtype=low_dtype, pieces=1 + seed % 3, x_off=seed % 3)
        same_on_triton("lamb_apply", case, gated=seed % 2 == 0)


def test_behind_a_closed_gate_nothing_is_written() -> None:
    case = lamb_apply_case(TILE + 70, seed=1, pieces=2, low_dtype=torch.bfloat16, loaded=True)
    assert_closed("lamb_apply", case)


@each_low
def test_onebit_lamb_measure_for_every_tail(low_dtype: torch.dtype | None) -> None:
    for seed, count in enumerate((*TAILS, 9 * TILE)):
        case = onebit_lamb_case(
            count, seed=seed, low_dtype=low_dtype, loaded=seed % 2 == 1, pieces=1 + seed % 3, x_off=seed % 3
        )
        same_on_triton("onebit_lamb_measure", case)


@pytest.mark.parametrize("at", [0, 999])
@pytest.mark.parametrize("variance", [float("nan"), -1e30], ids=["nan", "negative"])
def test_the_largest_factor_is_no_number_if_one_is_not(at: int, variance: float) -> None:
    """Whatever the sign of the NaN: that of the root of a negative number is negative on some machines."""
    case = onebit_lamb_case(1000, seed=0)
    case["p"][at], case["w"][at] = 1.0, variance
    on_triton("onebit_lamb_measure", case)
    assert bool(case["sums"][0, 2].isnan())
    assert not bool(case["sums"][0, :2].isnan().any())


def test_square_sum_for_every_tail() -> None:
    for seed, count in enumerate((0, *TAILS)):
        same_on_triton("square_sum", square_sum_case(count, seed=seed, elements_off=seed))


def test_square_sum_goes_by_memory() -> None:
    values = moderate(2 * 3 * 50, random(1)).view(2, 3, 50)
    straight = same_on_triton("square_sum", {"values": guarded(values)})
    assert same_on_triton("square_sum", {"values": guarded(values).permute(2, 0, 1)}) == straight


@pytest.mark.parametrize("operation", ["lamb_measure", "lamb_apply", "onebit_lamb_measure"])
def test_no_runs_are_nothing_to_do(operation: str) -> None:
    cases: dict[str, dict[str, Any]] = {
        "lamb_measure": lamb_measure_case(70, seed=1),
        "lamb_apply": lamb_apply_case(70, seed=1),
        "onebit_lamb_measure": onebit_lamb_case(70, seed=1),
    }
    same_on_triton(operation, cases[operation] | {"runs": torch.zeros(0, 6, dtype=torch.int64)})

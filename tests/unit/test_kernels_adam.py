"""Adam's dense steps: native kernels equal the reference to the bit, and both the formulas and torch's AdamW."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.formulas import Places, assert_sum, double
from tests.unit.kernel_cases import (
    PATIENT,
    SEEDS,
    TAILS,
    WORD,
    allocation,
    each_backend,
    each_grad,
    each_low,
    guarded,
    kernels_of,
    random,
    same_everywhere,
)
from tests.unit.sign_cases import (
    BETA,
    DECAY,
    EPS,
    GRADIENT,
    GRADIENTS,
    PARAMETER,
    RATE,
    RUNS,
    adam_case,
    dense_encode_case,
    moderate,
    precondition_case,
    square_sum_case,
)

either_gradient = pytest.mark.parametrize("by_sign", [False, True], ids=["floats", "signs"])
NO_RUNS = torch.zeros((0, 6), dtype=torch.int64)


# The gradient as floats ----------------------------------------------------------------------------------------------


@each_grad
def test_dense_encode_for_every_tail(grad_dtype: torch.dtype | None) -> None:
    for seed, count in enumerate(TAILS):
        case = dense_encode_case(count, seed=seed, grad_dtype=grad_dtype, scale=-1 / 3)
        assert same_everywhere("dense_encode", **case) is False


@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
def test_dense_encode_with_gradients_that_are_not_finite(grad_dtype: torch.dtype) -> None:
    for count in (65, 4097):
        case = dense_encode_case(count, seed=count, grad_dtype=grad_dtype, pieces=3, finite=False)
        assert same_everywhere("dense_encode", **case) is True


@PATIENT
@given(**RUNS, **GRADIENT)
def test_dense_encode_whatever_it_is_given(**case: Any) -> None:
    same_everywhere("dense_encode", **dense_encode_case(**case))


@each_backend
@each_grad
def test_dense_encode_writes_the_scaled_gradient(backend: str, grad_dtype: torch.dtype | None) -> None:
    case = dense_encode_case(500, seed=2, grad_dtype=grad_dtype, pieces=4, scale=-0.3)
    with kernels_of(backend) as kernels:
        assert kernels.dense_encode(**case) is False
    places = Places(case["runs"])
    expected = np.zeros(500) if grad_dtype is None else -0.3 * double(case["grad"])[places.in_param]
    assert_sum(places.floats(case["packets"]), expected)


@each_backend
@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
def test_dense_encode_sees_one_element_that_is_not_finite(backend: str, grad_dtype: torch.dtype) -> None:
    """Wherever it stands, and also where only its scale makes it so; it is written all the same."""
    for where in (0, 31, 32, 63, 64, 127, 191, 192, 199):
        for bad in (float("nan"), float("inf"), float("-inf"), 3e38):
            case = dense_encode_case(200, seed=1, grad_dtype=grad_dtype, pieces=3, scale=2.0)
            with kernels_of(backend) as kernels:
                assert kernels.dense_encode(**case) is False
                case["grad"][where] = bad
                assert kernels.dense_encode(**case) is True
            floats = Places(case["runs"]).floats(case["packets"])
            np.testing.assert_array_equal(floats[where], np.float64(bad) * np.inf)
            assert np.isfinite(np.delete(floats, where)).all()


# Adam's step ---------------------------------------------------------------------------------------------------------


@each_low
@either_gradient
@pytest.mark.parametrize("update_variance", [True, False], ids=["", "frozen"])
def test_adam_apply_for_every_tail(low_dtype: torch.dtype | None, by_sign: bool, update_variance: bool) -> None:
    for seed, count in enumerate(TAILS):
        case = adam_case(count, seed=seed, low_dtype=low_dtype, by_sign=by_sign, loaded=seed % 2 == 0)
        same_everywhere("adam_apply", **(case | {"update_variance": update_variance}))


@each_low
@either_gradient
def test_adam_apply_for_many_runs_and_steps(low_dtype: torch.dtype | None, by_sign: bool) -> None:
    case = adam_case(3000, seed=4, pieces=7, low_dtype=low_dtype, by_sign=by_sign, loaded=True)
    for _ in range(3):
        same_everywhere("adam_apply", **case)


@PATIENT
@given(
    **RUNS,
    **PARAMETER,
    by_sign=st.booleans(),
    beta1=BETA,
    beta2=BETA,
    eps=EPS,
    rate=RATE,
    correction=st.floats(1, 100),
    decay=DECAY,
    update_variance=st.booleans(),
)
def test_adam_apply_whatever_it_is_given(**case: Any) -> None:
    same_everywhere("adam_apply", **adam_case(**case))


@each_backend
@either_gradient
@pytest.mark.parametrize("update_variance", [True, False], ids=["", "frozen"])
def test_adam_apply_is_the_formula(backend: str, by_sign: bool, update_variance: bool) -> None:
    case = adam_case(500, seed=2, pieces=4, by_sign=by_sign, update_variance=update_variance)
    places = Places(case["runs"])
    at = places.element
    m, v, x = double(case["m"])[at], double(case["v"])[at], double(case["x"])[places.in_param]
    if by_sign:
        g = places.signs(case["gradient"]) * double(case["scales"])[places.shard]
    else:
        g = places.floats(case["gradient"])
    with kernels_of(backend) as kernels:
        total = kernels.adam_apply(**case)
    m_new, v_new, x_new = double(case["m"])[at], double(case["v"])[at], double(case["x"])[places.in_param]
    assert_sum(m_new, 0.9 * m, (1 - 0.9) * g)
    if update_variance:
        assert_sum(v_new, 0.999 * v, (1 - 0.999) * g**2)
    else:
        np.testing.assert_array_equal(v_new, v)
    assert total == pytest.approx(v_new.sum(), rel=1e-6)
    moves = v_new > 0
    assert moves.any()
    step = 1e-3 * m_new / (1.7 * np.sqrt(v_new) + 1e-8)
    assert_sum(x_new, np.where(moves, 0.99, 1.0) * x, -step * moves)


@each_backend
def test_twenty_steps_are_those_of_adamw(backend: str) -> None:
    count, lr, beta1, beta2, eps, weight_decay = 500, 1e-2, 0.9, 0.99, 1e-8, 0.1
    x = torch.randn(count, generator=random(0))
    theirs = torch.nn.Parameter(x.clone())
    adamw = torch.optim.AdamW([theirs], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
    m, v = torch.zeros(512), torch.zeros(512)
    size = 10.0 ** torch.arange(-5, 5).repeat(count // 10)
    for t in range(1, 21):
        gradient = torch.randn(count, generator=random(t)) * size
        theirs.grad = gradient.clone()
        adamw.step()
        with kernels_of(backend) as kernels:
            total = kernels.adam_apply(
                torch.tensor([[0, 0, count, 0, 0, 0]]),
                x,
                None,
                m,
                v,
                gradient.view(torch.uint8),
                None,
                beta1=beta1,
                beta2=beta2,
                eps=eps,
                rate=lr / (1 - beta1**t),
                correction=1 / math.sqrt(1 - beta2**t),
                decay=1 - lr * weight_decay,
                update_variance=True,
            )
        torch.testing.assert_close(x, theirs.detach(), rtol=2e-6, atol=2e-6 * lr)
        state = adamw.state[theirs]
        torch.testing.assert_close(m[:count] / size, state["exp_avg"] / size, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(v[:count], state["exp_avg_sq"], rtol=1e-5, atol=0)
        assert total == pytest.approx(float(v.double().sum()))


@each_backend
@each_low
def test_a_coordinate_without_variance_stays(backend: str, low_dtype: torch.dtype | None) -> None:
    """To the bit and whatever its momentum; the other half of the coordinates shows that the rest moves."""
    case = adam_case(333, seed=2, low_dtype=low_dtype, gradient=torch.zeros(4 * 400, dtype=torch.uint8))
    at = Places(case["runs"]).element
    case["v"][at] = torch.where(torch.arange(333) % 2 == 0, 0.0, 1.0)
    case["v"][at[4]] = -0.0
    case["x"][1::2] = 1.0
    if low_dtype is not None:
        case["low"].copy_(case["x"])
    watched = [case["x"]] if low_dtype is None else [case["x"], case["low"]]
    before = [tensor.clone() for tensor in watched]
    with kernels_of(backend) as kernels:
        for _ in range(3):
            kernels.adam_apply(**(case | {"decay": 0.5}))
    for old, tensor in zip(before, watched, strict=True):
        whole = torch.int16 if tensor.element_size() == 2 else torch.int32
        assert torch.equal(tensor[::2].view(whole), old[::2].view(whole))
        assert not bool((tensor[1::2] == old[1::2]).any())


@each_backend
def test_adam_apply_to_nothing_does_nothing(backend: str) -> None:
    case = adam_case(100, seed=0, runs=NO_RUNS)
    before = allocation(case["x"]).clone()
    with kernels_of(backend) as kernels:
        assert kernels.adam_apply(**case) == 0.0
    assert torch.equal(allocation(case["x"]), before)


@each_low
@either_gradient
def test_adam_apply_part_by_part_is_adam_apply(low_dtype: torch.dtype | None, by_sign: bool) -> None:
    """A big parameter has a part in each of several buckets, and they are applied one after the other."""
    options: dict[str, Any] = {"seed": 2, "pieces": 4, "low_dtype": low_dtype, "by_sign": by_sign, "loaded": True}
    whole, parted = adam_case(1000, **options), adam_case(1000, **options)
    runs = parted.pop("runs")
    same_everywhere("adam_apply", **whole)
    for part in (runs[1:2], runs[2:], runs[:1]):
        same_everywhere("adam_apply", runs=part, **parted)
    for name in ("x", "m", "v"):
        assert torch.equal(allocation(parted[name]), allocation(whole[name]))


# The frozen variance -------------------------------------------------------------------------------------------------


@each_backend
def test_precondition_is_the_formula(backend: str) -> None:
    case = precondition_case(1000, seed=1)
    v = double(case["v"])
    with kernels_of(backend) as kernels:
        kernels.precondition(**case)
    assert 0 < (v == 0).sum() < 500
    expected = np.where(v > 0, 1 / (np.maximum(np.sqrt(v) * 1.3, 1e-3) + 1e-8), 0)
    np.testing.assert_allclose(double(case["v"]), expected, rtol=1e-6)


@PATIENT
@given(count=st.integers(0, 300), seed=SEEDS, elements_off=st.integers(0, 2 * WORD))
def test_precondition_whatever_it_is_given(**case: Any) -> None:
    same_everywhere("precondition", **precondition_case(**case))


# Sum of squares ------------------------------------------------------------------------------------------------------


def test_square_sum_for_every_tail() -> None:
    for seed, count in enumerate((0, *TAILS)):
        result = same_everywhere("square_sum", **square_sum_case(count, seed=seed, elements_off=seed))
        values = double(square_sum_case(count, seed=seed)["values"])
        assert result == pytest.approx((values**2).sum(), rel=1e-5)


def test_square_sum_goes_by_memory() -> None:
    values = moderate(7 * 11 * 13, random(0)).view(7, 11, 13)
    straight = same_everywhere("square_sum", values=guarded(values))
    assert same_everywhere("square_sum", values=guarded(values).permute(2, 0, 1)) == straight


@PATIENT
@given(count=RUNS["count"], seed=SEEDS, elements_off=st.integers(0, 2 * WORD))
def test_square_sum_whatever_it_is_given(**case: Any) -> None:
    same_everywhere("square_sum", **square_sum_case(**case))

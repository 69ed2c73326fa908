"""LAMB: every native kernel equals the reference to the bit, and both of them the formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.formulas import Array, Places, assert_sum, assert_sums, double
from tests.unit.kernel_cases import PATIENT, TAILS, allocation, each_backend, each_low, kernels_of, same_everywhere
from tests.unit.sign_cases import (
    BETA,
    EPS,
    PARAMETER,
    RUNS,
    lamb_apply_case,
    lamb_measure_case,
    onebit_lamb_case,
)

WEIGHT_DECAY = st.one_of(st.just(0.0), st.floats(0, 1))
UNBIAS = st.floats(1, 100)
POSITIVE = st.floats(1e-6, 10)  # updates may be infinite, and 0 times infinity is some NaN or other


def ratio(m: Array, v: Array, x: Array, *, unbias: float, correction: float, eps: float, decay: float) -> Array:
    """LAMB's update before the trust ratio."""
    return (unbias * m / (np.sqrt(v) * correction + eps) + decay * x) * (v > 0)


# Measure -------------------------------------------------------------------------------------------------------------


@each_low
@pytest.mark.parametrize("loaded", [False, True], ids=["", "loaded"])
def test_lamb_measure_for_every_tail(low_dtype: torch.dtype | None, loaded: bool) -> None:
    for seed, count in enumerate(TAILS):
        same_everywhere("lamb_measure", **lamb_measure_case(count, seed=seed, low_dtype=low_dtype, loaded=loaded))


@PATIENT
@given(
    **RUNS,
    **PARAMETER,
    beta1=BETA,
    beta2=BETA,
    eps=EPS,
    unbias=UNBIAS,
    correction=UNBIAS,
    weight_decay=WEIGHT_DECAY,
)
def test_lamb_measure_whatever_it_is_given(**case: Any) -> None:
    same_everywhere("lamb_measure", **lamb_measure_case(**case))


@each_backend
@each_low
def test_lamb_measure_is_the_formula(backend: str, low_dtype: torch.dtype | None) -> None:
    """It reads the parameter, loaded weights included, and does not write it."""
    case = lamb_measure_case(500, seed=3, pieces=4, low_dtype=low_dtype, loaded=True, eps=1e-3)
    places = Places(case["runs"])
    at = places.element
    m, v, g = double(case["m"])[at], double(case["v"])[at], places.floats(case["gradient"])
    low_before = None if low_dtype is None else allocation(case["low"]).clone()
    with kernels_of(backend) as kernels:
        kernels.lamb_measure(**case)
    m_new, v_new = double(case["m"])[at], double(case["v"])[at]
    assert_sum(m_new, 0.9 * m, (1 - 0.9) * g)
    assert_sum(v_new, 0.999 * v, (1 - 0.999) * g**2)
    if low_dtype is not None:
        assert low_before is not None
        assert torch.equal(allocation(case["low"]), low_before)
        assert torch.equal(case["x"].to(low_dtype), case["low"])
    x = double(case["x"])[places.in_param]
    update = ratio(m_new, v_new, x, unbias=2.5, correction=1.7, eps=1e-3, decay=0.01)
    assert_sums(case["sums"], places.by_run(x**2), places.by_run(update**2), places.by_run(v_new))


# Apply ---------------------------------------------------------------------------------------------------------------


@each_low
def test_lamb_apply_for_every_tail(low_dtype: torch.dtype | None) -> None:
    for seed, count in enumerate(TAILS):
        same_everywhere("lamb_apply", **lamb_apply_case(count, seed=seed, low_dtype=low_dtype, pieces=1 + seed % 3))


@PATIENT
@given(**RUNS, **PARAMETER, eps=EPS, unbias=UNBIAS, correction=UNBIAS, weight_decay=WEIGHT_DECAY, rate=POSITIVE)
def test_lamb_apply_whatever_it_is_given(**case: Any) -> None:
    same_everywhere("lamb_apply", **lamb_apply_case(**case))


@each_backend
@each_low
def test_lamb_apply_is_the_formula(backend: str, low_dtype: torch.dtype | None) -> None:
    """It does not take over from the parameter: what `lamb_measure` has measured is what it moves."""
    case = lamb_apply_case(500, seed=3, pieces=4, low_dtype=low_dtype, loaded=True, rate=0.02, eps=1e-3)
    places = Places(case["runs"])
    at = places.element
    m, v, x = double(case["m"])[at], double(case["v"])[at], double(case["x"])[places.in_param]
    with kernels_of(backend) as kernels:
        kernels.lamb_apply(**case)
    moves = v > 0
    assert 0 < moves.sum() < 500
    update = ratio(m, v, x, unbias=2.5, correction=1.7, eps=1e-3, decay=0.0)
    assert_sum(double(case["x"])[places.in_param], x, -0.02 * 0.01 * x * moves, -0.02 * update)
    if low_dtype is not None:
        assert torch.equal(case["low"], case["x"].to(low_dtype))


@each_backend
def test_what_is_measured_is_what_is_applied(backend: str) -> None:
    measured = lamb_measure_case(500, seed=3, pieces=4, eps=1e-3)
    places = Places(measured["runs"])
    shared = {name: measured[name] for name in ("runs", "x", "low", "m", "v", "eps", "unbias", "correction")}
    with kernels_of(backend) as kernels:
        kernels.lamb_measure(**(measured | {"weight_decay": 0.0}))
        before = double(measured["x"])[places.in_param]
        measured["x"].zero_()
        kernels.lamb_apply(**shared, weight_decay=0.0, rate=1.0)
    update = double(measured["x"])[places.in_param]
    assert_sums(measured["sums"][:, :2], places.by_run(before**2), places.by_run(update**2))


# OneBitLamb ----------------------------------------------------------------------------------------------------------


@each_low
@pytest.mark.parametrize("loaded", [False, True], ids=["", "loaded"])
def test_onebit_lamb_measure_for_every_tail(low_dtype: torch.dtype | None, loaded: bool) -> None:
    for seed, count in enumerate(TAILS):
        case = onebit_lamb_case(count, seed=seed, pieces=1 + seed % 3, low_dtype=low_dtype, loaded=loaded)
        same_everywhere("onebit_lamb_measure", **case)


@PATIENT
@given(
    **RUNS,
    **PARAMETER,
    shrink=st.floats(0.01, 100),
    beta1=st.floats(0, 0.99),
    beta2=BETA,
    eps=EPS,
    unbias=UNBIAS,
    weight_decay=WEIGHT_DECAY,
)
def test_onebit_lamb_measure_whatever_it_is_given(**case: Any) -> None:
    same_everywhere("onebit_lamb_measure", **onebit_lamb_case(**case))


@each_backend
@each_low
def test_onebit_lamb_measure_is_the_formula(backend: str, low_dtype: torch.dtype | None) -> None:
    case = onebit_lamb_case(500, seed=3, pieces=4, low_dtype=low_dtype, loaded=True, eps=1e-3)
    case["p"].copy_(torch.where(case["p"] > 0, case["p"].clamp(1e-6, 1e6), case["p"]))
    case["scales"][1:], case["previous_scales"][1:] = torch.tensor([[1.5], [0.25]])
    case["scales"][2], case["previous_scales"][2] = 3e-4, 2e-5
    places = Places(case["runs"])
    at = places.element
    p, w = double(case["p"])[at], double(case["w"])[at]
    momentum = 0.7 * places.signs(case["answer_words"]) * double(case["scales"])[places.shard]
    before = 0.7 * places.signs(case["previous_words"]) * double(case["previous_scales"])[places.shard]
    low_before = None if low_dtype is None else allocation(case["low"]).clone()
    with kernels_of(backend) as kernels:
        kernels.onebit_lamb_measure(**case)
    moves = p > 0
    assert 0 < moves.sum() < 500
    w_new = double(case["w"])[at]
    gradient = (momentum - 0.9 * before) / (1 - 0.9)
    assert_sum(w_new, np.where(moves, 0.999, 1.0) * w, (1 - 0.999) * gradient**2 * moves)
    if low_dtype is not None:
        assert low_before is not None
        assert torch.equal(allocation(case["low"]), low_before)
        assert torch.equal(case["x"].to(low_dtype), case["low"])
    x = double(case["x"])[places.in_param]
    direction = 2.5 * momentum * p * moves
    update = direction + 0.01 * x * moves
    assert_sums(case["sums"][:, :2], places.by_run(direction**2), places.by_run(update**2))
    longer = np.divide(1, p * (np.sqrt(w_new) + 1e-3), where=moves, out=np.zeros(500))
    np.testing.assert_allclose(case["sums"][:, 2].numpy(), [run.max() for run in places.by_run(longer)], rtol=1e-5)


@each_backend
def test_a_run_at_rest_measures_nothing(backend: str) -> None:
    case = onebit_lamb_case(300, seed=2, pieces=3)
    case["p"][Places(case["runs"]).element[:128]] = torch.tensor([0.0, -0.0, -1.0, -(2.0**-149)]).repeat(32)
    before = allocation(case["w"]).clone()
    with kernels_of(backend) as kernels:
        kernels.onebit_lamb_measure(**(case | {"runs": case["runs"][:1]}))
    assert case["runs"][0, 2] == 128
    assert case["sums"].tolist()[0] == [0.0, 0.0, 0.0]
    assert bool((case["sums"][1:] == -7).all())
    assert torch.equal(allocation(case["w"]), before)

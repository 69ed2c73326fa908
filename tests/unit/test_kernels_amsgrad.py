"""AMSGrad: native kernels equal the reference to the bit, and both the formulas and torch's AdamW."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.formulas import Array, Places, assert_sum, double
from tests.unit.kernel_cases import (
    COUNTS,
    PATIENT,
    SEEDS,
    TAILS,
    WORD,
    allocation,
    each_backend,
    each_grad,
    each_low,
    hard_gradient,
    kernels_of,
    random,
    same_everywhere,
)
from tests.unit.markov_cases import (
    RATIO,
    SOURCES,
    WEIGHT,
    amsgrad_case,
    assert_bounds,
    assert_padding_counts_for_nothing,
    each_source,
    momentum_sum_case,
    sparse_amsgrad_case,
)
from tests.unit.sign_cases import BETA, DECAY, EPS, GRADIENT, GRADIENTS, PARAMETER, RATE, RUNS
from tests.unit.test_kernels_invariants import address, changed_bytes
from thinwire.kernels.modes import Source


def taken_over(case: dict[str, Any]) -> Tensor:
    """The parameter in fp32, after loaded weights have replaced their masters."""
    x, low = case["x"], case["low"]
    if low is None:
        return x.clone()
    return torch.where(x.to(low.dtype).view(torch.int16) == low.view(torch.int16), x, low.float())


# The step of all coordinates -----------------------------------------------------------------------------------------


@each_low
@each_source
def test_amsgrad_apply_for_every_tail(low_dtype: torch.dtype | None, source: int) -> None:
    for seed, count in enumerate(TAILS):
        case = amsgrad_case(count, seed=seed, source=source, low_dtype=low_dtype, loaded=seed % 2 == 0)
        same_everywhere("amsgrad_apply", **case)


@each_low
@each_source
def test_amsgrad_apply_for_many_runs_and_steps(low_dtype: torch.dtype | None, source: int) -> None:
    case = amsgrad_case(3000, seed=4, pieces=7, source=source, low_dtype=low_dtype, loaded=True)
    for _ in range(3):
        same_everywhere("amsgrad_apply", **case)


def test_signs_without_a_step_for_every_tail() -> None:
    for seed, count in enumerate(TAILS):
        same_everywhere("amsgrad_apply", **amsgrad_case(count, seed=seed, pieces=3, source=Source.SIGNS, steps=False))


@PATIENT
@given(
    **RUNS,
    **PARAMETER,
    source=st.sampled_from([*SOURCES]),
    beta1=BETA,
    beta2=BETA,
    eps=EPS,
    rate=RATE,
    correction=st.floats(1, 100),
    decay=DECAY,
)
def test_amsgrad_apply_whatever_it_is_given(**case: Any) -> None:
    same_everywhere("amsgrad_apply", **amsgrad_case(**case))


@PATIENT
@given(**RUNS)
def test_signs_without_a_step_whatever_they_are_given(**case: Any) -> None:
    same_everywhere("amsgrad_apply", **amsgrad_case(**case, source=Source.SIGNS, steps=False))


def gradient_of(case: dict[str, Any], places: Places) -> Array:
    """In double precision, by the source of a case."""
    if case["source"] == Source.FLOATS:
        return places.floats(case["packets"])
    g = double(case["g"])[places.element]
    if case["source"] == Source.STATE:
        return g
    bits: list[Array] = []
    for _, _, count, byte, _, _ in places.runs:
        bits.append(np.unpackbits(case["packets"].numpy()[byte:], bitorder="little")[:count])
    is_active = places.signs(case["active"]) > 0
    return g + (2.0 * np.concatenate(bits) - 1.0) * double(case["scales"])[places.shard] * is_active


@each_backend
@each_low
@each_source
def test_amsgrad_apply_is_the_formula(backend: str, low_dtype: torch.dtype | None, source: int) -> None:
    case = amsgrad_case(500, seed=2, pieces=4, source=source, low_dtype=low_dtype, loaded=True)
    places = Places(case["runs"])
    at = places.element
    m, v, peak = (double(case[name])[at] for name in ("m", "v", "peak"))
    x, g = double(taken_over(case))[places.in_param], gradient_of(case, places)
    held = case["g"].clone() if source == Source.STATE else torch.empty(0)
    with kernels_of(backend) as kernels:
        kernels.amsgrad_apply(**case)
    if source == Source.SIGNS:
        assert_sum(double(case["g"])[at], g)
        g = double(case["g"])[at]
    elif source == Source.STATE:
        assert torch.equal(case["g"][at], held[at])
    m_new, v_new, peak_new = (double(case[name])[at] for name in ("m", "v", "peak"))
    assert_sum(m_new, 0.9 * m, (1 - 0.9) * g)
    assert_sum(v_new, 0.999 * v, (1 - 0.999) * g**2)
    np.testing.assert_array_equal(peak_new, np.maximum(peak, v_new))
    assert (peak_new > v_new).any()
    assert (peak_new > peak).any()
    moves = peak_new > 0
    step = 1e-3 * m_new / (1.7 * np.sqrt(peak_new) + 1e-8)
    assert_sum(double(case["x"])[places.in_param], np.where(moves, 0.99, 1.0) * x, -step * moves)
    if low_dtype is not None:
        assert torch.equal(case["low"], case["x"].to(low_dtype))


@each_backend
def test_signs_without_a_step_are_taken_in_all_the_same(backend: str) -> None:
    """And a step by what is held then is a step by signs."""
    at_once, first = (amsgrad_case(500, seed=2, pieces=4, source=Source.SIGNS) for _ in range(2))
    step = dict.fromkeys(("x", "low", "m", "v", "peak"))
    with kernels_of(backend) as kernels:
        kernels.amsgrad_apply(**at_once)
        kernels.amsgrad_apply(**(first | step))
        assert torch.equal(allocation(first["g"]), allocation(at_once["g"]))
        kernels.amsgrad_apply(**(first | {"source": Source.STATE, "packets": None, "scales": None, "active": None}))
    for name in ("x", "m", "v", "peak", "g"):
        assert torch.equal(allocation(first[name]), allocation(at_once[name])), name


@each_backend
def test_twenty_steps_are_those_of_adamw_with_amsgrad(backend: str) -> None:
    count, lr, beta1, beta2, eps, weight_decay = 500, 1e-2, 0.9, 0.99, 1e-8, 0.1
    x = torch.randn(count, generator=random(0))
    theirs = torch.nn.Parameter(x.clone())
    adamw = torch.optim.AdamW([theirs], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, amsgrad=True)
    m, v, peak = torch.zeros(512), torch.zeros(512), torch.zeros(512)
    size = 10.0 ** torch.arange(-5, 5).repeat(count // 10)
    for t in range(1, 21):
        gradient = torch.randn(count, generator=random(t)) * size * (3 if t < 6 else 1)  # so that v falls again
        theirs.grad = gradient.clone()
        adamw.step()
        with kernels_of(backend) as kernels:
            kernels.amsgrad_apply(
                torch.tensor([[0, 0, count, 0, 0, 0]]),
                x,
                None,
                None,
                m,
                v,
                peak,
                gradient.view(torch.uint8),
                None,
                None,
                beta1=beta1,
                beta2=beta2,
                eps=eps,
                rate=lr / (1 - beta1**t),
                correction=1 / math.sqrt(1 - beta2**t),
                decay=1 - lr * weight_decay,
                source=Source.FLOATS,
            )
        torch.testing.assert_close(x, theirs.detach(), rtol=2e-6, atol=2e-6 * lr)
        state = adamw.state[theirs]
        torch.testing.assert_close(m[:count] / size, state["exp_avg"] / size, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(v[:count], state["exp_avg_sq"], rtol=1e-5, atol=0)
        torch.testing.assert_close(peak[:count], state["max_exp_avg_sq"], rtol=1e-5, atol=0)
    assert bool((peak > v).any())


@each_backend
@each_low
@each_source
def test_a_coordinate_that_never_had_a_variance_stays(backend: str, low_dtype: torch.dtype | None, source: int) -> None:
    """To the bit and whatever its momentum; the other half of the coordinates shows that the rest moves."""
    case = amsgrad_case(333, seed=2, source=source, low_dtype=low_dtype, decay=0.5)
    at = Places(case["runs"]).element
    for name in ("packets", "scales", "g"):  # without a gradient
        if case[name] is not None:
            case[name].zero_()
    case["v"][at] = 0.0
    case["peak"][at] = torch.where(torch.arange(333) % 2 == 0, 0.0, 1.0)
    case["peak"][at[4]] = -0.0
    case["x"][1::2] = 1.0
    if low_dtype is not None:
        case["low"].copy_(case["x"])
    watched = [case["x"]] if low_dtype is None else [case["x"], case["low"]]
    before = [tensor.clone() for tensor in watched]
    with kernels_of(backend) as kernels:
        for _ in range(3):
            kernels.amsgrad_apply(**case)
    for old, tensor in zip(before, watched, strict=True):
        whole = torch.int16 if tensor.element_size() == 2 else torch.int32
        assert torch.equal(tensor[::2].view(whole), old[::2].view(whole))
        assert not bool((tensor[1::2] == old[1::2]).any())


@each_backend
@each_low
@each_source
def test_amsgrad_apply_writes_its_own_places_and_no_others(
    backend: str, low_dtype: torch.dtype | None, source: int
) -> None:
    options: dict[str, Any] = {"seed": 3, "source": source, "low_dtype": low_dtype, "loaded": True}
    case = amsgrad_case(1700, pieces=5, **options)
    assert_bounds(backend, "amsgrad_apply", case | {"runs": case["runs"][[0, 1, 3, 4]]})
    for count in (1, 31, 33, 63, 65):
        assert_bounds(backend, "amsgrad_apply", amsgrad_case(count, **options))


@each_backend
@pytest.mark.parametrize("operation", ["held", "signs", "signs without a step", "momentum_sum"])
def test_padding_counts_for_nothing(backend: str, operation: str) -> None:
    make: dict[str, Any] = {
        "held": lambda: amsgrad_case(333, seed=3, source=Source.STATE, low_dtype=torch.bfloat16),
        "signs": lambda: amsgrad_case(333, seed=3, source=Source.SIGNS),
        "signs without a step": lambda: amsgrad_case(333, seed=3, source=Source.SIGNS, steps=False),
        "momentum_sum": lambda: momentum_sum_case(333, seed=3, grad_dtype=torch.float32, shift=WORD),
    }
    name = "momentum_sum" if operation == "momentum_sum" else "amsgrad_apply"
    assert_padding_counts_for_nothing(backend, name, make[operation](), make[operation]())


# The step of a few coordinates ---------------------------------------------------------------------------------------


@each_low
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_sparse_amsgrad_for_every_tail(low_dtype: torch.dtype | None, decay: float) -> None:
    for seed, count in enumerate(TAILS):
        for share in (0.0, 0.1, 1.0):
            same_everywhere(
                "sparse_amsgrad",
                **sparse_amsgrad_case(
                    count, seed=seed, share=share, low_dtype=low_dtype, loaded=seed % 2 == 0, decay=decay
                ),
            )


@PATIENT
@given(
    **PARAMETER,
    count=COUNTS,
    seed=SEEDS,
    share=st.floats(0, 1),
    beta2=BETA,
    eps=st.sampled_from([1e-40, 1e-12, 1e-6, 0.1]),
    rate=RATE,
    decay=DECAY,
)
def test_sparse_amsgrad_whatever_it_is_given(**case: Any) -> None:
    same_everywhere("sparse_amsgrad", **sparse_amsgrad_case(**case))


@each_backend
@each_low
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_sparse_amsgrad_is_the_formula(backend: str, low_dtype: torch.dtype | None, decay: float) -> None:
    """What is chosen for the first time is not decayed in that step; what has nothing to do counts as not chosen."""
    case = sparse_amsgrad_case(500, seed=3, share=0.5, low_dtype=low_dtype, loaded=True, decay=decay)
    for name in ("v", "peak"):
        case[name].clamp_(min=1e-12)  # a root of less would make much of what has vanished
    case["x"].nan_to_num_(neginf=-1.0)
    if low_dtype is not None:
        case["low"].nan_to_num_(neginf=-1.0)
    chosen = case["indices"].numpy() - case["first"]
    p, g = np.zeros(500), np.zeros(500)
    p[chosen], g[chosen] = double(case["momenta"]), double(case["gradients"])
    at_work = (p != 0) | (g != 0)
    assert 0 < at_work.sum() < chosen.size
    x, v, peak = double(taken_over(case)), double(case["v"])[:500], double(case["peak"])[:500]
    begun = v != np.float32(1e-6)
    assert (at_work & ~begun).any()
    assert (~at_work & begun).any()
    with kernels_of(backend) as kernels:
        kernels.sparse_amsgrad(**case)
    v_new, peak_new = double(case["v"])[:500], double(case["peak"])[:500]
    assert_sum(v_new, np.where(at_work, 0.99, 1.0) * v, (1 - 0.99) * g**2 * at_work)
    np.testing.assert_array_equal(peak_new, np.where(at_work, np.maximum(peak, v_new), peak))
    np.testing.assert_array_equal(v_new[~at_work], v[~at_work])
    step = np.divide(1e-3 * p, np.sqrt(peak_new), where=at_work, out=np.zeros(500))
    assert_sum(double(case["x"]), np.where(begun, decay, 1.0) * x, -step)
    if low_dtype is not None:
        assert torch.equal(case["low"], case["x"].to(low_dtype))


@each_backend
@each_low
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_sparse_amsgrad_writes_its_own_places_and_no_others(
    backend: str, low_dtype: torch.dtype | None, decay: float
) -> None:
    """States where there is work; the parameter too, unless others decay or are read from what was loaded."""
    case = sparse_amsgrad_case(333, seed=4, share=0.2, low_dtype=low_dtype, loaded=True, decay=decay, x_off=3)
    work = (case["momenta"] != 0) | (case["gradients"] != 0)
    at_work = (case["indices"][work] - case["first"]).tolist()
    everywhere = low_dtype is not None or decay != 1.0
    allowed: dict[str, Any] = {"v": at_work, "peak": at_work, "x": range(333) if everywhere else at_work}
    allowed["low"] = range(333)
    tensors = {name: argument for name, argument in case.items() if isinstance(argument, Tensor)}
    before = {name: allocation(tensor).clone() for name, tensor in tensors.items()}
    with kernels_of(backend) as kernels:
        kernels.sparse_amsgrad(**case)
    for name, tensor in tensors.items():
        size = tensor.element_size()
        places = {address(tensor) + size * i + byte for i in allowed.get(name, ()) for byte in range(size)}
        changed = changed_bytes(before[name], allocation(tensor))
        assert changed <= places, name
        assert bool(changed) == (name in allowed)


def test_sparse_amsgrad_goes_by_memory() -> None:
    case = sparse_amsgrad_case(7 * 11 * 13, seed=1, low_dtype=torch.bfloat16, loaded=True)
    shaped = sparse_amsgrad_case(7 * 11 * 13, seed=1, low_dtype=torch.bfloat16, loaded=True)
    for name in ("x", "low"):
        shaped[name] = shaped[name].view(7, 11, 13).permute(2, 0, 1)
    same_everywhere("sparse_amsgrad", **case)
    same_everywhere("sparse_amsgrad", **shaped)
    for name in ("x", "low", "v", "peak"):
        assert torch.equal(allocation(shaped[name]), allocation(case[name]))


# The local rule ------------------------------------------------------------------------------------------------------


@each_grad
def test_momentum_sum_for_every_tail(grad_dtype: torch.dtype | None) -> None:
    for seed, count in enumerate(TAILS):
        case = momentum_sum_case(count, seed=seed, grad_dtype=grad_dtype, pieces=1 + seed % 3)
        assert same_everywhere("momentum_sum", **case) is False


@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
def test_momentum_sum_with_gradients_that_are_not_finite(grad_dtype: torch.dtype) -> None:
    for count in (65, 4097):
        case = momentum_sum_case(count, seed=count, grad_dtype=grad_dtype, finite=False)
        assert same_everywhere("momentum_sum", **case) is True
        at = Places(case["runs"]).element
        for name in ("m", "e", "g"):
            assert bool(case[name][at].isfinite().all())


@each_grad
def test_momentum_sum_of_huge_errors(grad_dtype: torch.dtype | None) -> None:
    """A ratio can make them so, without a gradient too."""
    case = momentum_sum_case(1000, seed=1, pieces=3, grad_dtype=grad_dtype, ratio=1e12)
    case["e"][Places(case["runs"]).element] = hard_gradient(1000, torch.float32, random(0)).clamp(-1e12, 1e12)
    assert same_everywhere("momentum_sum", **case) is True


@PATIENT
@given(**RUNS, **GRADIENT, beta=BETA, weight=WEIGHT, ratio=RATIO, shifted=st.booleans())
def test_momentum_sum_whatever_it_is_given(seed: int, shifted: bool, **case: Any) -> None:
    same_everywhere("momentum_sum", **momentum_sum_case(seed=seed, shift=shifted * (seed % 5) * WORD, **case))


@each_backend
@each_grad
def test_momentum_sum_is_the_formula(backend: str, grad_dtype: torch.dtype | None) -> None:
    case = momentum_sum_case(500, seed=3, pieces=4, grad_dtype=grad_dtype, shift=2 * WORD, scale=-0.3)
    places = Places(case["runs"])
    own = places.element - 2 * WORD
    m, e = double(case["m"])[own], double(case["e"])[own]
    g = np.zeros(500) if grad_dtype is None else -0.3 * double(case["grad"])[places.in_param]
    with kernels_of(backend) as kernels:
        assert kernels.momentum_sum(**case) is False
    m_new = double(case["m"])[own]
    assert_sum(double(case["g"])[own], g)
    assert_sum(m_new, 0.9 * m, 0.1 * g)
    assert_sum(double(case["e"])[own], m_new, 1.3 * e)


@each_backend
@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
def test_an_element_with_a_bad_gradient_keeps_its_momentum_and_its_sum(backend: str, grad_dtype: torch.dtype) -> None:
    gradient = torch.randn(200, generator=random(1)).to(grad_dtype)
    with kernels_of(backend) as kernels:
        expected = momentum_sum_case(200, seed=2, pieces=3, grad_dtype=grad_dtype)
        assert kernels.momentum_sum(**(expected | {"grad": gradient})) is False
        at = Places(expected["runs"]).element
        for where in (0, 31, 32, 63, 64, 127, 191, 192, 199):
            for bad in (float("nan"), float("inf"), float("-inf")):
                case = momentum_sum_case(200, seed=2, pieces=3, grad_dtype=grad_dtype)
                kept = {"m": case["m"].clone(), "e": case["e"].clone(), "g": torch.zeros_like(case["g"])}
                with_it = gradient.clone()
                with_it[where] = bad
                assert kernels.momentum_sum(**(case | {"grad": with_it})) is True
                for name, untouched in kept.items():
                    mixed = expected[name].clone()
                    mixed[at[where]] = untouched[at[where]]
                    assert torch.equal(case[name][at], mixed[at])


@each_backend
def test_momenta_and_sums_stay_below_two_to_the_60(backend: str) -> None:
    below = torch.nextafter(torch.tensor(2.0**60), torch.tensor(0.0))
    runs = torch.tensor([[0, 0, WORD, 0, 0, 0]])
    for sign in (1.0, -1.0):
        for value, bad in ((below, False), (torch.tensor(2.0**60), True)):
            for of_gradient in (True, False):
                gradient, m, e, g = (torch.zeros(WORD) for _ in range(4))
                (gradient if of_gradient else e)[7] = sign * value
                rule: dict[str, Any] = {"beta": 0.0, "weight": 1.0, "scale": 1.0, "ratio": 1.0, "shift": 0}
                with kernels_of(backend) as kernels:
                    assert kernels.momentum_sum(runs, gradient, m, e, g, **rule) is bad
                assert m[7] == g[7] == (sign * value if of_gradient and not bad else 0.0)
                assert e[7] == (0.0 if of_gradient and bad else sign * value)


@each_backend
@each_grad
def test_momentum_sum_writes_its_own_places_and_no_others(backend: str, grad_dtype: torch.dtype | None) -> None:
    options: dict[str, Any] = {"seed": 3, "grad_dtype": grad_dtype, "shift": WORD}
    case = momentum_sum_case(1700, pieces=5, **options)
    assert_bounds(backend, "momentum_sum", case | {"runs": case["runs"][[0, 1, 3, 4]]})
    for count in (1, 31, 33, 63, 65):
        assert_bounds(backend, "momentum_sum", momentum_sum_case(count, **options))

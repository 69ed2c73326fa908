"""The kernels of a hierarchical topology equal the reference to the bit: a node's mean, a state that is but a slice of
the flat space, and the direction that travels uncompressed where there is a single node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.unit import test_kernels as flat
from tests.unit.kernel_cases import (
    COUNTS,
    FLOAT_PLANES,
    PATIENT,
    SEEDS,
    TAILS,
    WORD,
    activity_refresh_case,
    allocation,
    cut,
    each_backend,
    each_grad,
    each_low,
    each_state,
    either_amsgrad,
    encode_case,
    guarded,
    hard_gradient,
    kernels_of,
    random,
    random_bytes,
    same_everywhere,
)

each_row = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def direction_case(count: int, *, seed: int, pieces: int = 1, **options: Any) -> dict[str, Any]:
    case = encode_case(count, seed=seed, pieces=pieces, **options)
    del case["active"], case["key"]
    case["runs"], size = cut(count, pieces, first_word=seed % 5, planes=FLOAT_PLANES)
    return case | {"packets": guarded(random_bytes(size, generator=random(seed)))}


def mean_case(rows: int, count: int, *, seed: int, dtype: torch.dtype, finite: bool = True) -> dict[str, Any]:
    """Rows that do not follow each other without a gap: a header stands before each of them."""
    generator = random(seed)
    head, tail = seed % 7, seed % 3
    wide = hard_gradient(rows * (head + count + tail), dtype, generator, finite=finite).view(rows, -1)
    return {
        "rows": guarded(wide)[:, head : head + count],
        "out": guarded(torch.full((count + 1,), 9.0), elements_off=seed % 5)[:count],
    }


def dense_case(
    count: int,
    *,
    seed: int,
    pieces: int = 1,
    low_dtype: torch.dtype | None = None,
    resting: str = "some",
    loaded: bool = False,
    x_off: int = 0,
    lr: float = 1e-3,
    decay: float = 0.99,
) -> dict[str, Any]:
    """As `apply_case` of test_kernels, but the answer has a float an element, and NaN for those that rest."""
    case = flat.apply_case(count, seed=seed, low_dtype=low_dtype, loaded=loaded, x_off=x_off, lr=lr, decay=decay)
    for of_bits in ("active", "planes", "workers"):
        del case[of_bits]
    generator = random(seed)
    case["runs"], size = cut(count, pieces, first_word=seed % 5, planes=FLOAT_PLANES)
    answers = random_bytes(size, generator=generator)
    for _, _, elements, byte, _, _ in case["runs"].tolist():
        u = 2 * torch.rand(elements, generator=generator) - 1
        u[::5], u[1::6], u[2::7] = 1.0, -1.0, -0.0
        if resting == "all":
            u.fill_(torch.nan)
        elif resting == "some":
            u[torch.randint(0, 3, (elements,), generator=generator) == 0] = torch.nan
        answers[byte : byte + 4 * elements] = u.view(torch.uint8)
    return case | {"answers": guarded(answers)}


# Direction -----------------------------------------------------------------------------------------------------------


@each_state
@each_grad
@either_amsgrad
def test_direction_for_every_tail(grad_dtype: torch.dtype | None, state_dtype: torch.dtype, amsgrad: bool) -> None:
    for seed, count in enumerate(TAILS):
        case = direction_case(count, seed=seed, grad_dtype=grad_dtype, state_dtype=state_dtype, amsgrad=amsgrad)
        assert same_everywhere("birder_direction", **case) is False


@each_state
def test_direction_with_another_beta_for_b(state_dtype: torch.dtype) -> None:
    for seed, count in enumerate(TAILS):
        case = direction_case(count, seed=seed, grad_dtype=torch.float32, state_dtype=state_dtype)
        assert same_everywhere("birder_direction", **case, beta_b=0.95, level=0.3 + 0.1 * seed) is False


@each_state
@either_amsgrad
def test_direction_with_gradients_that_are_not_finite(state_dtype: torch.dtype, amsgrad: bool) -> None:
    for grad_dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (65, 4097):
            case = direction_case(
                count, seed=count, grad_dtype=grad_dtype, state_dtype=state_dtype, finite=False, amsgrad=amsgrad
            )
            assert same_everywhere("birder_direction", **case) is True


@PATIENT
@given(
    count=COUNTS,
    seed=SEEDS,
    pieces=st.integers(1, 6),
    finite=st.booleans(),
    grad_off=st.integers(0, 9),
    grad_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, None]),
    state_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    amsgrad=st.booleans(),
    beta=st.one_of(st.sampled_from([0.0, 0.8, 0.999]), st.floats(0, 1, exclude_max=True)),
    eps=st.sampled_from([0.0, 1e-40, 1e-12, 1e-3]),
    scale=st.floats(-100, 100),
)
def test_direction_whatever_it_is_given(**case: Any) -> None:
    same_everywhere("birder_direction", **direction_case(**case))


@each_backend
def test_direction_keeps_the_state_of_encode(backend: str) -> None:
    """The rule is the same; only what is sent differs. What is sent lies within [-1, 1], or is NaN at rest."""
    options: dict[str, Any] = {"seed": 3, "grad_dtype": torch.float32, "state_dtype": torch.float32, "eps": 1e-5}
    encoded, directed = encode_case(1000, **options), direction_case(1000, **options)
    with kernels_of(backend) as kernels:
        kernels.birder_encode(**encoded)
        kernels.birder_direction(**directed)
    assert torch.equal(allocation(encoded["m"]), allocation(directed["m"]))
    assert torch.equal(allocation(encoded["b"]), allocation(directed["b"]))
    ((element, _, count, byte, _, _),) = directed["runs"].tolist()
    u = directed["packets"][byte : byte + 4 * count].clone().view(torch.float32)
    b = directed["b"][element : element + count]
    assert torch.equal(u.isnan(), b <= 1e-5)
    assert 0 < int(u.isnan().sum()) < count
    assert bool((u[~u.isnan()].abs() <= 1).all())


# A state that is a slice ---------------------------------------------------------------------------------------------


@each_backend
@each_state
@pytest.mark.parametrize("operation", ["birder_encode", "birder_direction"])
def test_a_shifted_state_gives_what_the_whole_one_does(backend: str, state_dtype: torch.dtype, operation: str) -> None:
    """Draws, the activation map and the packets go by the element; only the state's own addresses are shifted."""
    make = encode_case if operation == "birder_encode" else direction_case
    options: dict[str, Any] = {"seed": 4, "pieces": 4, "grad_dtype": torch.float32, "state_dtype": state_dtype}
    whole, shifted = make(1500, **options), make(1500, **options, shift=4 * WORD)
    assert shifted["m"].numel() == whole["m"].numel() - 4 * WORD
    with kernels_of(backend) as kernels:
        getattr(kernels, operation)(**whole)
        getattr(kernels, operation)(**shifted)
    assert torch.equal(allocation(shifted["packets"]), allocation(whole["packets"]))
    for state in ("m", "b"):
        assert torch.equal(shifted[state], whole[state][4 * WORD :])


@each_backend
@each_state
def test_a_shifted_activity_refresh_is_that_of_the_whole_state(backend: str, state_dtype: torch.dtype) -> None:
    where = (13, 3, 40, 4, 3, 0, state_dtype)
    whole, shifted = activity_refresh_case(*where), activity_refresh_case(*where, shift=40 * WORD)
    with kernels_of(backend) as kernels:
        kernels.activity_refresh(**whole)
        kernels.activity_refresh(**shifted)
    assert torch.equal(allocation(shifted["packets"]), allocation(whole["packets"]))


@PATIENT
@given(COUNTS, SEEDS, st.integers(1, 5), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
def test_shifted_states_whatever_they_are(
    count: int, seed: int, pieces: int, state_dtype: torch.dtype, amsgrad: bool
) -> None:
    """A slice stands as many elements before its place in the flat space as other ranks have of what precedes it."""
    options: dict[str, Any] = {"pieces": pieces, "grad_dtype": torch.float32, "amsgrad": amsgrad}
    options |= {"seed": seed, "state_dtype": state_dtype, "shift": seed % 5 * WORD}
    same_everywhere("birder_encode", **encode_case(count, **options))
    same_everywhere("birder_direction", **direction_case(count, **options))
    same_everywhere(
        "activity_refresh", **activity_refresh_case(9, 2, seed % 50, 4, seed % 4, seed, state_dtype, seed % 50 * WORD)
    )


# Mean ----------------------------------------------------------------------------------------------------------------


@each_row
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9])
def test_mean_for_every_tail(rows: int, dtype: torch.dtype) -> None:
    for seed, count in enumerate((*TAILS, 1023, 1024, 1025)):
        same_everywhere("mean", **mean_case(rows, count, seed=seed, dtype=dtype))


@PATIENT
@given(st.integers(1, 12), COUNTS, SEEDS, st.sampled_from([torch.float32, torch.bfloat16]))
def test_mean_whatever_it_is_given(rows: int, count: int, seed: int, dtype: torch.dtype) -> None:
    same_everywhere("mean", **mean_case(rows, count, seed=seed, dtype=dtype))


@each_backend
@each_row
def test_a_mean_is_finite_only_where_all_its_terms_are(backend: str, dtype: torch.dtype) -> None:
    """Else a step that must be skipped would be taken. Which NaN comes out is the processor's business."""
    case = mean_case(3, 500, seed=1, dtype=dtype, finite=False)
    rows: Tensor = case["rows"]
    with kernels_of(backend) as kernels:
        kernels.mean(rows, case["out"])
    bad = ~rows.isfinite().all(0)
    assert 0 < int(bad.sum()) < 500
    assert not bool(case["out"][bad].isfinite().any())


# Apply ---------------------------------------------------------------------------------------------------------------


@each_low
@pytest.mark.parametrize("resting", ["none", "some", "all"])
def test_dense_apply_for_every_tail(low_dtype: torch.dtype | None, resting: str) -> None:
    for seed, count in enumerate(TAILS):
        same_everywhere("dense_apply", **dense_case(count, seed=seed, low_dtype=low_dtype, resting=resting))


@each_low
def test_dense_apply_to_masters_whose_parameter_was_loaded(low_dtype: torch.dtype | None) -> None:
    case = dense_case(4100, seed=3, pieces=5, low_dtype=low_dtype, loaded=True)
    for _ in range(3):
        same_everywhere("dense_apply", **case)


@each_backend
@each_low
def test_dense_apply_leaves_what_rests_and_what_is_beside_alone(backend: str, low_dtype: torch.dtype | None) -> None:
    case = dense_case(333, seed=2, low_dtype=low_dtype, resting="all")
    watched = [case["x"], case["low"]] if low_dtype else [case["x"]]
    before = [allocation(tensor).clone() for tensor in watched]
    with kernels_of(backend) as kernels:
        kernels.dense_apply(**case)
    for old, tensor in zip(before, watched, strict=True):
        assert torch.equal(allocation(tensor), old)


@PATIENT
@given(
    count=COUNTS,
    seed=SEEDS,
    pieces=st.integers(1, 6),
    resting=st.sampled_from(["none", "some", "all"]),
    low_dtype=st.sampled_from([None, torch.bfloat16, torch.float16]),
    loaded=st.booleans(),
    x_off=st.integers(0, 9),
    lr=st.one_of(st.just(0.0), st.floats(0, 10)),
    decay=st.one_of(st.just(1.0), st.floats(0.1, 1), st.floats(-1, -0.1)),
)
def test_dense_apply_whatever_it_is_given(**case: Any) -> None:
    same_everywhere("dense_apply", **dense_case(**case))

"""Every native kernel equals the torch reference to the bit, with every instruction set that this machine has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.kernel_cases import (
    COUNTS,
    ISAS,
    PATIENT,
    REFERENCE,
    SEEDS,
    TAILS,
    WORD,
    activation_map,
    activity_refresh_case,
    cut,
    each_grad,
    each_low,
    each_state,
    either_amsgrad,
    encode_case,
    guarded,
    hard_gradient,
    random,
    random_bytes,
    same_everywhere,
)
from thinwire.kernels import native

WORKERS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33)
SIGNAL_BLOCK = 16 * 4096 // WORD
"""Words from one sample of the signal to the next."""

KEYS = st.integers(0, 2**64 - 1)


def test_the_machine_has_native_kernels_to_test() -> None:
    """Without them every comparison of this file would be skipped."""
    assert native.available()
    assert native.isa() in ISAS


# Encode --------------------------------------------------------------------------------------------------------------


@each_state
def test_encode_with_another_beta_for_b(state_dtype: torch.dtype) -> None:
    for seed, count in enumerate(TAILS):
        case = encode_case(count, seed=seed, grad_dtype=torch.float32, state_dtype=state_dtype)
        assert same_everywhere("birder_encode", **case, beta_b=0.95, level=0.3 + 0.1 * seed) is False


@each_state
@each_grad
@either_amsgrad
def test_encode_for_every_tail(grad_dtype: torch.dtype | None, state_dtype: torch.dtype, amsgrad: bool) -> None:
    for seed, count in enumerate(TAILS):
        case = encode_case(count, seed=seed, grad_dtype=grad_dtype, state_dtype=state_dtype, amsgrad=amsgrad)
        assert same_everywhere("birder_encode", **case) is False


@each_state
@each_grad
def test_encode_for_many_runs_and_steps(grad_dtype: torch.dtype | None, state_dtype: torch.dtype) -> None:
    case = encode_case(3000, seed=4, pieces=7, grad_dtype=grad_dtype, state_dtype=state_dtype, eps=1e-5)
    for step in range(4):
        if grad_dtype is not None:
            case["grad"] = hard_gradient(3000, grad_dtype, random(step))
        same_everywhere("birder_encode", **(case | {"key": step}))


@each_state
@pytest.mark.parametrize("scale", [-1.0, 0.5, -3.0, 2.0**-16, 1 / 3, 0.0, 1e-30, 1e30])
def test_encode_with_scaled_gradients(state_dtype: torch.dtype, scale: float) -> None:
    for grad_dtype in (torch.float32, torch.bfloat16, torch.float16):
        case = encode_case(1000, seed=7, grad_dtype=grad_dtype, state_dtype=state_dtype, scale=scale)
        same_everywhere("birder_encode", **case)


@each_state
@either_amsgrad
def test_encode_with_gradients_that_are_not_finite(state_dtype: torch.dtype, amsgrad: bool) -> None:
    for grad_dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (65, 4097):
            case = encode_case(
                count, seed=count, grad_dtype=grad_dtype, state_dtype=state_dtype, finite=False, amsgrad=amsgrad
            )
            assert same_everywhere("birder_encode", **case) is True


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_encode_reads_every_half_as_torch_does(grad_dtype: torch.dtype) -> None:
    """All 65536 of them, signalling NaN and subnormal numbers included; beta = 0 copies the gradient into m."""
    case = encode_case(65536, seed=0, grad_dtype=grad_dtype, state_dtype=torch.float32, beta=0.0)
    case["grad"] = torch.arange(-32768, 32768, dtype=torch.int16).view(grad_dtype)
    before = case["m"].clone()
    assert same_everywhere("birder_encode", **case) is True
    wanted = case["grad"].float()
    torch.testing.assert_close(case["m"], wanted.where(wanted.isfinite(), before), rtol=0, atol=0)


@pytest.mark.parametrize("elements_off", [1, 3, 7, 17])
def test_encode_takes_gradients_at_any_address(elements_off: int) -> None:
    for grad_dtype in (torch.float32, torch.bfloat16, torch.float16):
        case = encode_case(4100, seed=2, grad_dtype=grad_dtype, state_dtype=torch.float32, grad_off=elements_off)
        assert case["grad"].data_ptr() % 64 != 0
        same_everywhere("birder_encode", **case)


@PATIENT
@given(
    count=COUNTS,
    seed=SEEDS,
    pieces=st.integers(1, 6),
    active=st.sampled_from(["all", "some", "none"]),
    finite=st.booleans(),
    grad_off=st.integers(0, 9),
    grad_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, None]),
    state_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    amsgrad=st.booleans(),
    beta=st.one_of(st.sampled_from([0.0, 0.8, 0.999]), st.floats(0, 1, exclude_max=True)),
    eps=st.sampled_from([0.0, 1e-40, 1e-12, 1e-3]),
    scale=st.floats(-100, 100),
    key=KEYS,
)
def test_encode_whatever_it_is_given(**case: Any) -> None:
    same_everywhere("birder_encode", **encode_case(**case))


# Activity -----------------------------------------------------------------------------------------------------------


def activity_update_case(
    shard_words: int, shards: int, first_word: int, period: int, phase: int, seed: int, planes: int
) -> dict[str, Any]:
    generator = random(seed)
    size = 32 + 8 * (planes * shard_words + -(-shard_words // period))
    return {
        "active": guarded(activation_map("some", first_word + shards * shard_words, generator)),
        "first_word": first_word,
        "shard_words": shard_words,
        "answers": guarded(random_bytes(shards, size, generator=generator)),
        "byte": 32,
        "planes": planes,
        "period": period,
        "phase": phase,
    }


GEOMETRY = {
    "shard_words": st.integers(1, 40),
    "shards": st.integers(1, 5),
    "first_word": st.integers(0, 50),
    "period": st.integers(1, 16),
    "phase": st.integers(0, 15),
    "seed": SEEDS,
}


@each_state
def test_activity_refresh_over_shard_boundaries(state_dtype: torch.dtype) -> None:
    """Shards that are shorter and longer than the period, and every phase: some shards have no word to refresh."""
    for shard_words in (1, 3, 4, 5, 13):
        for phase in range(4):
            same_everywhere(
                "activity_refresh", **activity_refresh_case(shard_words, 3, 7, 4, phase, phase, state_dtype)
            )
    same_everywhere("activity_refresh", **activity_refresh_case(300, 2, 129, 256, 255, 0, state_dtype))


@PATIENT
@given(**GEOMETRY, state_dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_activity_refresh_whatever_it_is_given(**case: Any) -> None:
    case["phase"] %= case["period"]
    same_everywhere("activity_refresh", **activity_refresh_case(**case))


@PATIENT
@given(**GEOMETRY, planes=st.integers(1, 6))
def test_activity_update_of_any_size(**case: Any) -> None:
    case["phase"] %= case["period"]
    same_everywhere("activity_update", **activity_update_case(**case))


# Votes ---------------------------------------------------------------------------------------------------------------


def vote_case(workers: int, words: int, active: str | None, seed: int, *, signal: bool = True) -> dict[str, Any]:
    generator = random(seed)
    first_word = seed % 7
    is_active = None if active is None else guarded(activation_map(active, first_word + words, generator))
    return {
        "rows": guarded(random_bytes(workers, 32 + 8 * words, generator=generator)),
        "byte": 32,
        "active": is_active,
        "first_word": first_word,
        "words": words,
        "answer": guarded(random_bytes(16 + 8 * words, generator=generator)),
        "answer_byte": 16,
        "key": 0x8000000000000001 + seed,
        "signal": guarded(torch.tensor([5, 7])) if signal else None,
    }


def majority_case(workers: int, words: int, active: str, seed: int, *, signal: bool = True) -> dict[str, Any]:
    case = vote_case(workers, words, active, seed, signal=signal)
    del case["key"]
    return case | {"casting": seed % workers}


def count_case(workers: int, words: int, active: str, seed: int, *, signal: bool = True) -> dict[str, Any]:
    case = vote_case(workers, words, active, seed, signal=signal)
    del case["key"]
    planes = workers.bit_length()
    answer = guarded(random_bytes(16 + 8 * words * planes, generator=random(seed)))
    return case | {"planes": planes, "answer": answer}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("active", ["all", "some", "none", None], ids=str)
def test_vote_bit(workers: int, active: str | None) -> None:
    for words in (1, 2, 63, 64, 65, 130):
        same_everywhere("vote_bit", **vote_case(workers, words, active, seed=words))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("active", ["all", "some", "none"])
def test_vote_majority(workers: int, active: str) -> None:
    for words in (1, 2, 63, 64, 65, 130):
        same_everywhere("vote_majority", **majority_case(workers, words, active, seed=words))


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_every_row_can_decide_ties(workers: int) -> None:
    case = majority_case(workers, 3, "all", seed=1)
    answers = set()
    for casting in range(workers):
        same_everywhere("vote_majority", **(case | {"casting": casting}))
        REFERENCE.vote_majority(**(case | {"casting": casting}))
        answers.add(tuple(case["answer"].tolist()))
    assert len(answers) == workers


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("active", ["all", "some", "none"])
def test_vote_count(workers: int, active: str) -> None:
    for words in (1, 2, 63, 64, 65, 130):
        same_everywhere("vote_count", **count_case(workers, words, active, seed=words))


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 33])
def test_the_signal_is_sampled_alike(workers: int) -> None:
    words = SIGNAL_BLOCK + 70  # two samples, the second one cut short
    same_everywhere("vote_count", **count_case(workers, words, "some", seed=0))
    same_everywhere("vote_bit", **vote_case(workers, words, "some", seed=1))
    same_everywhere("vote_bit", **vote_case(workers, words, "some", seed=1, signal=False))
    same_everywhere("vote_majority", **majority_case(workers, words, "some", seed=2))


@PATIENT
@given(st.integers(1, 40), st.integers(1, 70), st.sampled_from(["all", "some", "none", None]), SEEDS)
def test_vote_bit_whatever_it_is_given(workers: int, words: int, active: str | None, seed: int) -> None:
    same_everywhere("vote_bit", **vote_case(workers, words, active, seed))


@PATIENT
@given(st.integers(1, 40), st.integers(1, 70), st.sampled_from(["all", "some", "none"]), SEEDS, st.booleans())
def test_vote_majority_whatever_it_is_given(workers: int, words: int, active: str, seed: int, signal: bool) -> None:
    same_everywhere("vote_majority", **majority_case(workers, words, active, seed, signal=signal))


@PATIENT
@given(st.integers(1, 40), st.integers(1, 70), st.sampled_from(["all", "some", "none"]), SEEDS, st.booleans())
def test_vote_count_whatever_it_is_given(workers: int, words: int, active: str, seed: int, signal: bool) -> None:
    same_everywhere("vote_count", **count_case(workers, words, active, seed, signal=signal))


# Apply ---------------------------------------------------------------------------------------------------------------


def apply_case(
    count: int,
    *,
    seed: int,
    workers: int = 0,
    pieces: int = 1,
    active: str = "some",
    low_dtype: torch.dtype | None = None,
    loaded: bool = False,
    x_off: int = 0,
    lr: float = 1e-3,
    decay: float = 0.99,
) -> dict[str, Any]:
    """`loaded`: other numbers were loaded into half of the low-precision parameter."""
    generator = random(seed)
    first_word = seed % 5
    planes = max(workers.bit_length(), 1)
    runs, size = cut(count, pieces, first_word=first_word, planes=planes)
    x = hard_gradient(count, torch.float32, generator)
    x[::17] = float("-inf")
    low: Tensor | None = None
    if low_dtype is not None:
        low = x.to(low_dtype)
        if loaded:
            low[1::2] = hard_gradient(count, low_dtype, generator)[1::2]
        low = guarded(low, elements_off=x_off)
    return {
        "runs": runs,
        "x": guarded(x, elements_off=x_off),
        "low": low,
        "active": guarded(activation_map(active, first_word + -(-count // WORD), generator)),
        "answers": guarded(random_bytes(size, generator=generator)),
        "planes": planes,
        "workers": workers,
        "lr": lr,
        "decay": decay,
    }


@each_low
@pytest.mark.parametrize("workers", [0, 1, 2, 3, 8, 33])
def test_apply_for_every_tail(low_dtype: torch.dtype | None, workers: int) -> None:
    for seed, count in enumerate(TAILS):
        same_everywhere("birder_apply", **apply_case(count, seed=seed, workers=workers, low_dtype=low_dtype))


@each_low
@pytest.mark.parametrize("active", ["all", "some", "none"])
@pytest.mark.parametrize("workers", [0, 5])
def test_apply_to_masters_whose_parameter_was_loaded(low_dtype: torch.dtype | None, active: str, workers: int) -> None:
    case = apply_case(4100, seed=3, active=active, workers=workers, pieces=5, low_dtype=low_dtype, loaded=True)
    for _ in range(3):
        same_everywhere("birder_apply", **case)


@each_low
def test_apply_to_a_part_of_a_parameter_leaves_the_rest_alone(low_dtype: torch.dtype | None) -> None:
    """A big parameter has a part in each of several buckets, and they are applied one after the other."""
    case = apply_case(1000, seed=2, pieces=4, low_dtype=low_dtype, loaded=True)
    runs = case.pop("runs")
    assert runs.shape[0] > 2
    for part in (runs[1:2], runs[2:], runs[:1]):
        same_everywhere("birder_apply", runs=part, **case)


@PATIENT
@given(
    count=COUNTS,
    seed=SEEDS,
    workers=st.one_of(st.just(0), st.integers(1, 300)),
    pieces=st.integers(1, 6),
    active=st.sampled_from(["all", "some", "none"]),
    low_dtype=st.sampled_from([None, torch.bfloat16, torch.float16]),
    loaded=st.booleans(),
    x_off=st.integers(0, 9),
    lr=st.one_of(st.just(0.0), st.floats(0, 10)),
    decay=st.one_of(st.just(1.0), st.floats(0.1, 1), st.floats(-1, -0.1)),  # 0 times infinity is some NaN or other
)
def test_apply_whatever_it_is_given(**case: Any) -> None:
    same_everywhere("birder_apply", **apply_case(**case))

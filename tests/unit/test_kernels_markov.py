"""Markov compression: native kernels equal the reference to the bit, and both the formulas; messages add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.formulas import Array, Places, assert_sum, assert_sums, double
from tests.unit.kernel_cases import (
    PATIENT,
    TAILS,
    WORD,
    allocation,
    each_backend,
    each_grad,
    hard_gradient,
    kernels_of,
    random,
    same_everywhere,
)
from tests.unit.markov_cases import (
    ALIVE,
    MODES,
    WEIGHT,
    assert_bounds,
    assert_padding_counts_for_nothing,
    each_activity,
    each_mode,
    each_momentum,
    markov_difference_case,
    markov_encode_case,
    markov_merge_case,
)
from tests.unit.sign_cases import BETA, GRADIENT, GRADIENTS, RUNS, in_flat
from tests.unit.test_kernels_sums import adversarial, in_order
from thinwire.kernels.modes import MarkovMode

WORKERS = (1, 2, 3, 4, 5, 7, 8, 16, 33)


def bits_of(words: Tensor, at: Array) -> Array:
    """The bits of words of the flat space, or of a part of it that begins as many elements later as `at` is less."""
    return np.unpackbits(words.numpy().view(np.uint8), bitorder="little")[at] == 1


# A worker's signs ----------------------------------------------------------------------------------------------------


@each_mode
@each_momentum
@each_grad
def test_markov_encode_for_every_tail(grad_dtype: torch.dtype | None, momentum: bool, mode: int) -> None:
    for seed, count in enumerate(TAILS):
        case = markov_encode_case(count, seed=seed, grad_dtype=grad_dtype, momentum=momentum, mode=mode)
        assert same_everywhere("markov_encode", **case) is False


@each_momentum
@each_grad
@each_activity
def test_markov_encode_for_many_runs_and_steps(grad_dtype: torch.dtype | None, momentum: bool, active: str) -> None:
    """With scales that follow from the sums, and coordinates that have spoken where they were active."""
    case = markov_encode_case(3000, seed=4, pieces=7, grad_dtype=grad_dtype, momentum=momentum, active=active)
    for step in range(4):
        if grad_dtype is not None:
            case["grad"] = hard_gradient(3000, grad_dtype, random(step))
        same_everywhere("markov_encode", **case)
        case["sent_scales"][1:] = float(case["sums"][0, 0]) / 3000
        case["sent_mask"] = case["active"]


@each_mode
@each_momentum
@each_activity
@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
def test_markov_encode_with_gradients_that_are_not_finite(
    grad_dtype: torch.dtype, momentum: bool, mode: int, active: str
) -> None:
    for count in (65, 4097):
        case = markov_encode_case(
            count, seed=count, grad_dtype=grad_dtype, momentum=momentum, mode=mode, active=active, finite=False
        )
        assert same_everywhere("markov_encode", **case) is (mode != MarkovMode.REPLAY)
        assert bool(case["sums"].isfinite().all())


@each_mode
@each_momentum
def test_markov_encode_of_huge_memories(momentum: bool, mode: int) -> None:
    """No step makes them, but a checkpoint might bring them. Without a gradient nothing is reported."""
    for grad_dtype in (None, torch.float32):
        case = markov_encode_case(1000, seed=1, grad_dtype=grad_dtype, momentum=momentum, mode=mode, pieces=3)
        at = Places(case["runs"]).element
        case["known"][at] = hard_gradient(1000, torch.float32, random(0))
        blamed = same_everywhere("markov_encode", **case)
        assert blamed is (grad_dtype is not None and mode != MarkovMode.REPLAY)
        assert bool(case["sums"].isfinite().all())


@PATIENT
@given(
    **RUNS,
    **GRADIENT,
    mode=st.sampled_from([*MODES]),
    momentum=st.booleans(),
    active=ALIVE,
    beta=BETA,
    weight=WEIGHT,
    shifted=st.booleans(),
)
def test_markov_encode_whatever_it_is_given(seed: int, shifted: bool, **case: Any) -> None:
    same_everywhere("markov_encode", **markov_encode_case(seed=seed, shift=shifted * (seed % 5) * WORD, **case))


@each_backend
@each_mode
@each_momentum
@each_grad
def test_markov_encode_is_the_formula(backend: str, mode: int, momentum: bool, grad_dtype: torch.dtype | None) -> None:
    case = markov_encode_case(
        500, seed=3, pieces=4, mode=mode, momentum=momentum, grad_dtype=grad_dtype, shift=2 * WORD, scale=-0.3
    )
    places = Places(case["runs"])
    own = places.element - 2 * WORD
    known, sent_mask = double(case["known"])[own], bits_of(case["sent_mask"], places.element)
    is_active = bits_of(case["active"], places.element)
    message = (
        np.where(bits_of(case["sent_words"], own), 1.0, -1.0) * double(case["sent_scales"])[places.shard] * sent_mask
    )
    m = double(case["m"])[own] if case["m"] is not None else np.zeros(500)
    g = -0.3 * double(case["grad"])[places.in_param] if case["grad"] is not None else np.zeros(500)
    with kernels_of(backend) as kernels:
        assert kernels.markov_encode(**case) is False
    if case["m"] is not None:
        m_new = double(case["m"])[own]
        assert_sum(m_new, m) if case["grad"] is None else assert_sum(m_new, 0.9 * m, 0.1 * g)
        meant = m_new
    else:
        meant = np.float32(g).astype(np.float64)
    known_new = double(case["known"])[own]
    if mode == MarkovMode.REPLAY:
        meant, before = known, np.zeros(500)
    else:
        before = np.float32(known + message).astype(np.float64)
    remembered = mode == MarkovMode.ACTIVATION and case["m"] is None
    assert_sum(known_new, np.where(is_active | (not remembered), before, meant))
    change = meant - before
    clear = ~is_active | (np.abs(change) > 1e-6 * (np.abs(meant) + np.abs(before)) + 1e-30) | (change == 0)
    bits = places.bits(case["packets"])
    np.testing.assert_array_equal(bits[clear], np.where(is_active, change >= 0, meant != 0)[clear])
    assert clear.sum() > 400
    assert_sums(
        case["sums"],
        places.by_run(np.abs(change) * is_active),
        places.by_run(change**2 * is_active),
        places.by_run(is_active.astype(float)),
    )


@each_backend
@each_mode
@each_momentum
def test_sent_words_are_the_bits_of_the_packet(backend: str, mode: int, momentum: bool) -> None:
    """To the last word, padding included; words of others stay."""
    case = markov_encode_case(777, seed=4, pieces=3, mode=mode, momentum=momentum, shift=2 * WORD)
    before = case["sent_words"].clone()
    with kernels_of(backend) as kernels:
        kernels.markov_encode(**case)
    for element, _, count, byte, _, _ in case["runs"].tolist():
        first, words = element // WORD - 2, -(-count // WORD)
        sent = case["packets"][byte : byte + 8 * words].clone().view(torch.int64)
        assert torch.equal(case["sent_words"][first : first + words], sent)
        before[first : first + words] = sent
    assert torch.equal(case["sent_words"], before)
    assert int(case["sent_words"][-1]) >> (777 % WORD) == 0


@each_backend
@each_momentum
def test_the_sums_have_the_order(backend: str, momentum: bool) -> None:
    """That of tests/unit/test_kernels_sums.py, and what is not active counts nothing."""
    case = markov_encode_case(1500, seed=3, pieces=5, momentum=momentum, grad_dtype=None, mode=MarkovMode.ORDINARY)
    places = Places(case["runs"])
    values = torch.from_numpy(adversarial(1500, 2))
    case["known"].copy_(in_flat(torch.zeros(1500) if momentum else -values, 3))
    if momentum:
        case["m"].copy_(in_flat(values, 3))
    case["sent_mask"].zero_()
    is_active = bits_of(case["active"], places.element)
    with kernels_of(backend) as kernels:
        kernels.markov_encode(**case)
    counted = np.where(is_active, values.numpy(), np.float32(0.0))
    assert case["sums"][:, 0].tolist() == [in_order(run) for run in places.by_run(np.abs(counted))]
    assert case["sums"][:, 1].tolist() == [in_order(run) for run in places.by_run(counted * counted)]
    assert case["sums"][:, 2].tolist() == [run.sum() for run in places.by_run(is_active)]


@each_backend
def test_the_sign_of_no_change_is_positive_and_a_zero_has_no_activation_bit(backend: str) -> None:
    for active, bit in (("all", True), ("none", False)):
        case = markov_encode_case(100, seed=0, active=active, grad_dtype=torch.float32)
        zeros = torch.tensor([0.0, -0.0])
        case["known"].copy_(in_flat(zeros.repeat_interleave(50), 0))
        case["grad"].copy_(zeros.repeat(50))
        case["sent_mask"].zero_()
        with kernels_of(backend) as kernels:
            kernels.markov_encode(**case)
        assert (Places(case["runs"]).bits(case["packets"]) == bit).all()


# An owner's signs ----------------------------------------------------------------------------------------------------


@each_activity
@pytest.mark.parametrize("workers", WORKERS)
def test_markov_merge_for_every_tail(workers: int, active: str) -> None:
    for seed, count in enumerate(TAILS[:-1]):
        same_everywhere("markov_merge", **markov_merge_case(count, workers=workers, seed=seed, active=active))


@PATIENT
@given(**RUNS, workers=st.integers(1, 40), active=ALIVE, shifted=st.booleans())
def test_markov_merge_whatever_it_is_given(seed: int, shifted: bool, **case: Any) -> None:
    same_everywhere("markov_merge", **markov_merge_case(seed=seed, shift=shifted * (seed % 5) * WORD, **case))


@each_backend
@each_activity
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_markov_merge_is_the_formula(backend: str, workers: int, active: str) -> None:
    case = markov_merge_case(500, workers=workers, seed=3, pieces=4, active=active, shift=2 * WORD)
    places = Places(case["runs"])
    own, is_active = places.element - 2 * WORD, bits_of(case["active"], places.element)
    old, g = double(case["mean"])[own], double(case["g"])[places.element]
    for row in range(workers):  # the kernel need not care for the padding of what it gets
        for _, _, count, byte, _, _ in places.runs:
            case["rows"][row, byte + count // 8 : byte + 8 * -(-count // WORD)] = 0
    bits = [places.bits(row) for row in case["rows"]]
    sent_words = [np.where(b, s, -s) / workers for b, s in zip(bits, double(case["scales"]), strict=True)]
    with kernels_of(backend) as kernels:
        kernels.markov_merge(**case)
    new = double(case["mean"])[own]
    assert_sum(new, old, *(row * is_active for row in sent_words))
    np.testing.assert_array_equal(new[~is_active], old[~is_active])
    change = np.float32(new) - np.float32(g)
    expected = np.where(is_active, change >= 0, np.any(bits, axis=0))
    np.testing.assert_array_equal(places.bits(case["answer"]), expected)
    counted = np.where(is_active, change, np.float32(0.0))
    assert case["sums"][:, 0].tolist() == [in_order(run) for run in places.by_run(np.abs(counted))]
    assert case["sums"][:, 1].tolist() == [in_order(run) for run in places.by_run(counted * counted)]
    assert case["sums"][:, 2].tolist() == [run.sum() for run in places.by_run(is_active)]


# The difference as floats --------------------------------------------------------------------------------------------


@each_momentum
@each_grad
def test_markov_difference_for_every_tail(grad_dtype: torch.dtype | None, momentum: bool) -> None:
    for seed, count in enumerate(TAILS):
        case = markov_difference_case(count, seed=seed, grad_dtype=grad_dtype, momentum=momentum)
        assert same_everywhere("markov_difference", **case) is False


@each_momentum
@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
def test_markov_difference_with_gradients_that_are_not_finite(grad_dtype: torch.dtype, momentum: bool) -> None:
    for count in (65, 4097):
        case = markov_difference_case(count, seed=count, grad_dtype=grad_dtype, momentum=momentum, finite=False)
        assert same_everywhere("markov_difference", **case) is True
        assert bool(case["c"][Places(case["runs"]).element].isfinite().all())


@PATIENT
@given(**RUNS, **GRADIENT, momentum=st.booleans(), beta=BETA, weight=WEIGHT, shifted=st.booleans())
def test_markov_difference_whatever_it_is_given(seed: int, shifted: bool, **case: Any) -> None:
    same_everywhere("markov_difference", **markov_difference_case(seed=seed, shift=shifted * (seed % 5) * WORD, **case))


@each_backend
@each_momentum
@each_grad
def test_the_difference_is_what_the_signs_are_of(backend: str, momentum: bool, grad_dtype: torch.dtype | None) -> None:
    """With bad gradients too; in a step where `known` has all messages."""
    options: dict[str, Any] = {"seed": 3, "pieces": 4, "grad_dtype": grad_dtype, "momentum": momentum}
    options |= {"shift": 2 * WORD, "scale": -0.3, "finite": False}
    case, other = markov_encode_case(500, active="all", **options), markov_difference_case(500, **options)
    case["sent_mask"].zero_()
    places = Places(case["runs"])
    with kernels_of(backend) as kernels:
        assert kernels.markov_encode(**case) is kernels.markov_difference(**other) is (grad_dtype is not None)
    c = other["c"].numpy()[places.element - 2 * WORD]
    np.testing.assert_array_equal(places.bits(case["packets"]), c >= 0)
    assert case["sums"][:, 1].tolist() == [in_order(run) for run in places.by_run(c * c)]
    for name in ("known", "m"):
        if case[name] is not None:
            assert torch.equal(allocation(other[name]), allocation(case[name]))


# Bounds --------------------------------------------------------------------------------------------------------------


def a_case_of(operation: str, count: int, pieces: int) -> dict[str, Any]:
    if operation == "markov_merge":
        return markov_merge_case(count, workers=3, seed=3, pieces=pieces, shift=WORD)
    make = markov_encode_case if operation == "markov_encode" else markov_difference_case
    return make(count, seed=3, pieces=pieces, momentum=True, shift=WORD)


each_operation = pytest.mark.parametrize("operation", ["markov_encode", "markov_merge", "markov_difference"])


@each_backend
@each_operation
def test_an_operation_writes_its_own_places_and_no_others(backend: str, operation: str) -> None:
    """Of all runs but one in the middle, or of one that ends within a word."""
    case = a_case_of(operation, 1700, 5)
    assert_bounds(backend, operation, case | {"runs": case["runs"][[0, 1, 3, 4]]})
    for count in (1, 31, 33, 63, 65):
        assert_bounds(backend, operation, a_case_of(operation, count, 1))


@each_backend
@each_mode
def test_a_worker_without_momentum_writes_its_own_places_and_no_others(backend: str, mode: int) -> None:
    assert_bounds(backend, "markov_encode", markov_encode_case(700, seed=3, pieces=5, mode=mode, shift=WORD))


@each_backend
@each_operation
def test_padding_counts_for_nothing(backend: str, operation: str) -> None:
    assert_padding_counts_for_nothing(backend, operation, a_case_of(operation, 333, 1), a_case_of(operation, 333, 1))


@each_backend
@each_operation
def test_a_shifted_memory_gives_what_the_whole_one_does(backend: str, operation: str) -> None:
    make: dict[str, Any] = {
        "markov_encode": lambda **options: markov_encode_case(1500, momentum=True, **options),
        "markov_difference": lambda **options: markov_difference_case(1500, momentum=True, **options),
        "markov_merge": lambda **options: markov_merge_case(1500, workers=3, **options),
    }
    whole = make[operation](seed=4, pieces=4)
    shifted = make[operation](seed=4, pieces=4, shift=4 * WORD)
    with kernels_of(backend) as kernels:
        assert getattr(kernels, operation)(**whole) == getattr(kernels, operation)(**shifted)
    at = Places(whole["runs"]).element
    for name in {"known", "m", "c", "mean"} & set(whole):
        assert torch.equal(shifted[name][at - 4 * WORD], whole[name][at])
    for name in {"packets", "answer", "sums"} & set(whole):
        assert torch.equal(allocation(shifted[name]), allocation(whole[name]))

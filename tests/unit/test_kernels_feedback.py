"""Error memories lose nothing: what was sent and what is kept make the input, and what must not be taken in is not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.formulas import Array, Places, double, sign_of
from tests.unit.kernel_cases import PATIENT, SEEDS, WORD, each_backend, each_low, each_state, kernels_of, random
from tests.unit.sign_cases import (
    GRADIENTS,
    MEMORY,
    in_flat,
    momentum_encode_case,
    sign_apply_case,
    sign_encode_case,
    sign_merge_case,
    step_apply_case,
)
from thinwire.kernels.ops import Kernels

HALF_AN_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8 + 2.0**-24}
"""Of a number that was rounded to float32 and then stored; as a share of it."""


def scales_of(runs: Tensor, sums: Tensor) -> Tensor:
    """What the sums of squares make the scales of the shards: the root of the mean square, rounded to float32."""
    squares, lengths = [0.0] * (2 + int(runs[:, 5].max())), [0] * (2 + int(runs[:, 5].max()))
    for run, total in zip(runs.tolist(), sums.tolist(), strict=True):
        squares[run[5]] += total
        lengths[run[5]] += run[2]
    return torch.tensor([math.sqrt(s / n) if n else 0.0 for s, n in zip(squares, lengths, strict=True)])


def same_bits(a: Tensor, b: Tensor) -> bool:
    whole = torch.int16 if a.element_size() == 2 else torch.int32
    return torch.equal(a.view(whole), b.view(whole))


# Sent + kept == input ------------------------------------------------------------------------------------------------


def assert_split(whole: Array, sent: Array, kept: Array, dtype: torch.dtype) -> None:
    """Up to the rounding of the state; exact where both have one magnitude (Sterbenz)."""
    left = whole - sent
    assert (np.abs(kept - left) <= HALF_AN_ULP[dtype] * np.abs(left) + 2.0**-133).all()
    alike = (np.abs(whole) <= 2 * np.abs(sent)) & (np.abs(whole) >= np.abs(sent) / 2)
    if dtype == torch.float32:
        np.testing.assert_array_equal((sent + kept)[alike], whole[alike])


@each_backend
@PATIENT
@given(count=st.integers(1, 500), seed=SEEDS, pieces=st.integers(1, 4), state_dtype=MEMORY)
def test_a_workers_sent_and_kept_make_its_input(
    backend: str, count: int, seed: int, pieces: int, state_dtype: torch.dtype
) -> None:
    """What is kept shows in a step without a gradient, without an answer."""
    case = sign_encode_case(count, seed=seed, pieces=pieces, grad_dtype=torch.float32, state_dtype=state_dtype)
    places = Places(case["runs"])
    with kernels_of(backend) as kernels:
        kernels.sign_encode(**case)
        whole = double(case["c"])[places.element]
        scales = scales_of(case["runs"], case["sums"])
        sent = np.where(places.bits(case["packets"]), 1.0, -1.0) * double(scales)[places.shard]
        silence = {"grad": None, "sent_scales": scales, "answer_scales": torch.zeros_like(scales)}
        kernels.sign_encode(**(case | silence))
    assert_split(whole, sent, double(case["c"])[places.element], state_dtype)


@each_backend
@PATIENT
@given(
    count=st.integers(1, 500),
    seed=SEEDS,
    pieces=st.integers(1, 4),
    workers=st.integers(1, 5),
    state_dtype=MEMORY,
)
def test_an_owners_answer_and_what_it_keeps_make_its_input(
    backend: str, count: int, seed: int, pieces: int, workers: int, state_dtype: torch.dtype
) -> None:
    case = sign_merge_case(count, seed=seed, pieces=pieces, workers=workers, state_dtype=state_dtype)
    places = Places(case["runs"])
    with kernels_of(backend) as kernels:
        kernels.sign_merge(**case)
        whole = double(case["y"])[places.element]
        block_scales = scales_of(case["runs"], case["sums"])
        scales = double(block_scales)[places.shard]
        sent = np.where(places.bits(case["answer"]), scales, -scales)
        kernels.sign_merge(**(case | {"scales": torch.zeros_like(case["scales"]), "last_scales": block_scales}))
    assert_split(whole, sent, double(case["y"])[places.element], state_dtype)


def whole_scale(runs: Tensor, sums: Tensor, multiple: int) -> float:
    """A scale near the root of the mean square with which all arithmetic below is exact: the law is for any scale."""
    return float(multiple * round(math.sqrt(float(sums.sum()) / int(runs[:, 2].sum())) / multiple))


class Exchange:
    """Workers and an owner of one shard; inputs and scales are small whole numbers, so that nothing is rounded."""

    def __init__(self, workers: int, count: int, dtype: torch.dtype) -> None:
        self.workers, self.count = workers, count
        self.runs = torch.tensor([[0, 0, WORD, 0, 0, 0], [WORD, WORD, count - WORD, 8, 0, 0]])
        self.places = Places(self.runs)
        size = -(-count // WORD) * WORD
        self.memories = [torch.zeros(size, dtype=dtype) for _ in range(workers)]
        self.sent = torch.zeros(workers)
        self.owner = torch.zeros(size, dtype=dtype)
        self.rows = torch.zeros((workers, size // 8), dtype=torch.uint8)
        self.answer = torch.zeros(size // 8, dtype=torch.uint8)
        self.scale = 0.0

    def step(self, kernels: Kernels, gradients: list[Tensor]) -> Array:
        """The mean input of all workers."""
        sums = torch.zeros(2, dtype=torch.float64)
        answer_words, half_of_it = self.answer.view(torch.int64).clone(), self.scale / 2 // 1
        for i, (c, gradient) in enumerate(zip(self.memories, gradients, strict=True)):
            sent, answer_scales = self.sent[i : i + 1].clone(), torch.tensor([2 * half_of_it])
            table = {"sent_scales": sent, "answer_scales": answer_scales, "sums": sums}
            rule = {"beta": 0.5, "weight": 0.25, "scale": 4.0, "shift": 0}
            assert not kernels.sign_encode(self.runs, gradient, c, answer_words, self.rows[i], **table, **rule)
            self.sent[i] = whole_scale(self.runs, sums, 4)
        last = torch.tensor([self.scale])
        kernels.sign_merge(
            self.runs,
            self.rows,
            self.owner,
            self.answer,
            scales=self.sent[:, None],
            last_scales=last,
            sums=sums,
            shift=0,
        )
        self.scale = whole_scale(self.runs, sums, 1)
        momentum = half_of_it * self.places.signs(answer_words)
        return momentum + sum(double(gradient) for gradient in gradients) / self.workers

    def answered(self) -> Array:
        return self.scale * self.places.signs(self.answer.view(torch.int64))

    def kept(self) -> Array:
        """The error of the owner and the mean error of the workers."""
        y = double(self.owner)[: self.count]
        errors = y - sign_of(y) * self.scale
        for c, scale in zip(self.memories, self.sent.tolist(), strict=True):
            input_of_one = double(c)[: self.count]
            errors += (input_of_one - sign_of(input_of_one) * scale) / self.workers
        return errors


@each_backend
@each_state
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_nothing_is_lost_over_many_steps(backend: str, state_dtype: torch.dtype, workers: int) -> None:
    """All answers together and what is still kept are all inputs together, exactly."""
    exchange = Exchange(workers, 100, state_dtype)
    inputs, answers = np.zeros(100), np.zeros(100)
    with kernels_of(backend) as kernels:
        for step in range(20):
            generator = random(step)
            gradients = [torch.randint(-6, 7, (100,), generator=generator).float() for _ in range(workers)]
            inputs += exchange.step(kernels, gradients)
            answers += exchange.answered()
            largest = max(np.abs(double(memory)).max() for memory in (exchange.owner, *exchange.memories))
            assert largest <= 256, "bfloat16 could not tell it from its neighbour"
            np.testing.assert_array_equal(answers + exchange.kept(), inputs)
    assert np.abs(exchange.kept()).max() > 0
    assert np.abs(answers).max() > 0


@each_backend
@each_state
def test_what_roundings_lose_over_many_steps_is_theirs(backend: str, state_dtype: torch.dtype) -> None:
    """With realistic scales: each step may lose half an ulp of what it stores, and a little of what it adds."""
    case = sign_encode_case(500, seed=3, pieces=4, grad_dtype=torch.float32, state_dtype=state_dtype, weight=1.0)
    places = Places(case["runs"])
    case["c"].copy_(in_flat(torch.zeros(500, dtype=state_dtype), 3))
    scales, answer_words = torch.zeros_like(case["sent_scales"]), torch.zeros_like(case["answer_scales"])
    inputs, sent, lost, whole = np.zeros(500), np.zeros(500), np.zeros(500), np.zeros(500)
    for step in range(50):
        gradient = torch.randn(500, generator=random(step))
        with kernels_of(backend) as kernels:
            kernels.sign_encode(**(case | {"grad": gradient, "sent_scales": scales, "answer_scales": answer_words}))
        scales = scales_of(case["runs"], case["sums"])
        whole = double(case["c"])[places.element]
        inputs += double(gradient)[places.in_param]
        sent += sign_of(whole) * double(scales)[places.shard]
        lost += HALF_AN_ULP[state_dtype] * 1.01 * np.abs(whole) + 1e-6
    kept = whole - sign_of(whole) * double(scales)[places.shard]
    assert (np.abs(sent + kept - inputs) <= lost).all()
    assert lost.max() < (1e-3 if state_dtype == torch.float32 else 1.0)


# What must not be taken in -------------------------------------------------------------------------------------------

BAD = (float("nan"), float("inf"), float("-inf"))


@each_backend
@each_state
@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
@pytest.mark.parametrize("operation", ["sign_encode", "momentum_encode"])
def test_a_gradient_that_is_not_finite_counts_as_none(
    backend: str, state_dtype: torch.dtype, grad_dtype: torch.dtype, operation: str
) -> None:
    """Wherever it stands, the other elements are what they are without it, and no state is poisoned.

    A momentum keeps its value then, while a gradient of zero would let it decay.
    """

    def encoded(gradient: Tensor) -> tuple[bool, dict[str, Any]]:
        options: dict[str, Any] = {"seed": 2, "pieces": 3, "grad_dtype": grad_dtype, "state_dtype": state_dtype}
        if operation == "momentum_encode":
            options |= {"output": 1, "rate": 0.5}
        make = sign_encode_case if operation == "sign_encode" else momentum_encode_case
        case: dict[str, Any] = make(200, **options)
        with kernels_of(backend) as kernels:
            return getattr(kernels, operation)(**(case | {"grad": gradient})), case

    gradient = torch.randn(200, generator=random(1)).to(grad_dtype)
    good, without = encoded(gradient)
    assert good is False
    at = Places(without["runs"]).element
    for where in (0, 31, 32, 63, 64, 127, 191, 192, 199):
        silent = gradient.clone()
        silent[where] = 0.0
        _, expected = encoded(silent)
        if operation == "momentum_encode":
            _, untouched = encoded(torch.full((200,), float("nan"), dtype=grad_dtype))
            for state in ("m", "c"):
                expected[state][at[where]] = untouched[state][at[where]]
        for bad in BAD:
            gradient_with_it = gradient.clone()
            gradient_with_it[where] = bad
            found, case = encoded(gradient_with_it)
            assert found is True
            for state in ("c", "m") if operation == "momentum_encode" else ("c",):
                assert torch.equal(case[state][at], expected[state][at])
                assert bool(case[state][at].isfinite().all())
            assert bool(case["sums"].isfinite().all())


@each_backend
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_memory_stays_below_two_to_the_60(backend: str, grad_dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    limit = torch.tensor([2.0**60], dtype=grad_dtype)
    below = torch.nextafter(limit, torch.zeros_like(limit))
    for sign in (1.0, -1.0):
        for value, bad in ((below, False), (limit, True)):
            gradient = torch.zeros(WORD, dtype=grad_dtype)
            gradient[7] = sign * value
            c, m, sums = torch.zeros(WORD, dtype=state_dtype), torch.zeros(WORD), torch.zeros(1, dtype=torch.float64)
            none, packet = torch.zeros(1), torch.zeros(8, dtype=torch.uint8)
            runs, answer_words = torch.tensor([[0, 0, WORD, 0, 0, 0]]), torch.zeros(1, dtype=torch.int64)
            rule: dict[str, Any] = {"sent_scales": none, "sums": sums, "beta": 0.0, "weight": 1.0, "scale": 1.0}
            with kernels_of(backend) as kernels:
                found = kernels.sign_encode(
                    runs, gradient, c, answer_words, packet, answer_scales=none, shift=0, **rule
                )
                assert found is bad
                assert c[7] == (0.0 if bad else gradient[7].to(state_dtype))
                c.zero_()
                found = kernels.momentum_encode(runs, gradient, m, c, packet, rate=1.0, shift=0, output=1, **rule)
            assert found is bad
            assert m[7] == (0.0 if bad else gradient[7])
            assert c[7] == (0.0 if bad else gradient[7].to(state_dtype))
            assert bool(sums.isfinite().all())


# What rests ----------------------------------------------------------------------------------------------------------


@each_backend
@each_low
@pytest.mark.parametrize("anchored", [False, True], ids=["", "anchored"])
@pytest.mark.parametrize("operation", ["sign_apply", "step_apply"])
def test_a_coordinate_without_a_preconditioner_stays(
    backend: str, low_dtype: torch.dtype | None, operation: str, anchored: bool
) -> None:
    """To the bit, or it goes back to where the anchor is; the other coordinates move."""
    make = sign_apply_case if operation == "sign_apply" else step_apply_case
    case: dict[str, Any] = make(333, seed=2, pieces=3, low_dtype=low_dtype, anchored=anchored, decay=0.5)
    places = Places(case["runs"])
    p = torch.where(torch.arange(333) % 2 == 0, 0.0, 1.0)
    p[::4] = -0.0
    case["p"][places.element] = p
    case["x"][1::2] = 1.0
    if anchored and operation == "sign_apply":
        case["anchor"][1::2] = 1.0
        stay = case["anchor"].clone()
    else:
        stay = case["x"].clone()
    if low_dtype is not None:
        case["low"].copy_(case["x"])
    with kernels_of(backend) as kernels:
        for _ in range(3):
            getattr(kernels, operation)(**case)
    assert same_bits(case["x"][::2], stay[::2])
    assert not bool((case["x"][1::2] == 1.0).any())
    if low_dtype is not None:
        assert same_bits(case["low"], case["x"].to(low_dtype))

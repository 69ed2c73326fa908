"""What must hold whatever the numbers are: |m| <= b, nothing poisoned, nothing written outside, no end at 2**32."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.oracles import birder as oracle
from tests.unit.kernel_cases import (
    PATIENT,
    WORD,
    allocation,
    cut,
    each_backend,
    guarded,
    hard_gradient,
    hard_state,
    kernels_of,
    random,
    random_bytes,
)

MAP_NORESERVE = 0x4000  # Linux; the mmap module knows it from Python 3.11 on
GRADIENTS = [torch.float32, torch.bfloat16, torch.float16]
STATES = [torch.float32, torch.bfloat16]
RULE: dict[str, Any] = {"beta": 0.8, "eps": 1e-12, "scale": 1.0, "amsgrad": False}


def whole(count: int) -> Tensor:
    return torch.tensor([[0, 0, count, 0, 0, 0]])


def zeros(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.zeros(count, dtype=dtype), torch.zeros(count, dtype=dtype)


def everybody_alive(words: int) -> Tensor:
    return torch.full((words,), -1)


# |m| <= b ------------------------------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("state_dtype", STATES, ids=str)
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
def test_m_never_exceeds_b(backend: str, state_dtype: torch.dtype, amsgrad: bool) -> None:
    """Roundings included: u = m / b is a probability without any clamp. Equal signs make them equal all the way."""
    count = 2048
    m, b = zeros(count, state_dtype)
    packets = torch.zeros(count // 8, dtype=torch.uint8)
    for step in range(60):
        gradient = hard_gradient(count, GRADIENTS[step % 3], random(step))
        gradient[: count // 4] = gradient[: count // 4].abs()
        rule = RULE | {"beta": (0.8, 0.999, 0.1)[step % 3], "amsgrad": amsgrad}
        with kernels_of(backend) as kernels:
            kernels.birder_encode(whole(count), gradient, m, b, everybody_alive(count // 64), packets, **rule, key=step)
        assert bool((m.abs() <= b).all())
        if not amsgrad:
            assert torch.equal(m[: count // 4], b[: count // 4])


@each_backend
@PATIENT
@given(
    seed=st.integers(0, 2**32 - 1),
    beta=st.floats(0, 1, exclude_max=True),
    scale=st.floats(-2, 2),
    amsgrad=st.booleans(),
    state_dtype=st.sampled_from(STATES),
    grad_dtype=st.sampled_from(GRADIENTS),
)
def test_m_never_exceeds_b_for_any_beta(
    backend: str,
    seed: int,
    beta: float,
    scale: float,
    amsgrad: bool,
    state_dtype: torch.dtype,
    grad_dtype: torch.dtype,
) -> None:
    count = 128
    m, b = hard_state(count, state_dtype, random(seed))
    rule = RULE | {"beta": beta, "scale": scale, "amsgrad": amsgrad}
    packets = torch.zeros(count // 8, dtype=torch.uint8)
    for step in range(5):
        gradient = hard_gradient(count, grad_dtype, random(seed + step), finite=False)
        gradient = gradient.where(gradient.abs() < torch.finfo(grad_dtype).max, torch.nan)  # a sum may overflow
        with kernels_of(backend) as kernels:
            kernels.birder_encode(whole(count), gradient, m, b, everybody_alive(2), packets, **rule, key=step)
        assert bool((m.abs() <= b).all())


# What is not finite --------------------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("state_dtype", STATES, ids=str)
@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
def test_one_element_that_is_not_finite_is_seen_and_left_alone(
    backend: str, state_dtype: torch.dtype, grad_dtype: torch.dtype, amsgrad: bool
) -> None:
    """Wherever it stands: in a full word, at either end, in the tail, in a later run."""
    count = 200
    runs, size = cut(count, 3, first_word=0)
    rule = RULE | {"amsgrad": amsgrad}
    state = hard_state(256, state_dtype, random(0))
    gradient = torch.randn(count, generator=random(1)).to(grad_dtype)

    def encoded(grad: Tensor) -> tuple[bool | None, Tensor, Tensor]:
        m, b = state[0].clone(), state[1].clone()
        packets = torch.zeros(size, dtype=torch.uint8)
        with kernels_of(backend) as kernels:
            found = kernels.birder_encode(runs, grad, m, b, everybody_alive(4), packets, **rule, key=3)
        return found, m, b

    found, m_without, b_without = encoded(gradient)
    assert found is False
    for where in (0, 31, 32, 63, 64, 127, 191, 192, 199):
        for bad in (float("nan"), float("inf"), float("-inf")):
            poisoned = gradient.clone()
            poisoned[where] = bad
            found, m, b = encoded(poisoned)
            assert found is True
            here = torch.arange(256) == where
            assert torch.equal(m, torch.where(here, state[0], m_without))
            assert torch.equal(b, torch.where(here, state[1], b_without))


@each_backend
def test_a_gradient_that_its_scale_makes_infinite_counts_as_such(backend: str) -> None:
    m, b = zeros(64, torch.float32)
    gradient = torch.zeros(64)
    gradient[5] = 1e38
    for scale, infinite in ((1.0, False), (-3.0, False), (4.0, True), (-4.0, True)):
        packets = torch.zeros(8, dtype=torch.uint8)
        rule = RULE | {"scale": scale}
        with kernels_of(backend) as kernels:
            found = kernels.birder_encode(whole(64), gradient, m, b, everybody_alive(1), packets, **rule, key=0)
        assert found is infinite


@each_backend
@pytest.mark.parametrize("state_dtype", STATES, ids=str)
def test_sampling_again_without_a_gradient_gives_the_same_bits(backend: str, state_dtype: torch.dtype) -> None:
    """After an activation round bits are sampled a second time; the state must have been sampled as it was stored."""
    count = 1000
    m, b = zeros(1024, state_dtype)
    first, second = torch.zeros(128, dtype=torch.uint8), torch.zeros(128, dtype=torch.uint8)
    gradient = torch.randn(count, generator=random(0))
    with kernels_of(backend) as kernels:
        kernels.birder_encode(whole(count), gradient, m, b, everybody_alive(16), first, **RULE, key=9)
        state = m.clone(), b.clone()
        assert kernels.birder_encode(whole(count), None, m, b, everybody_alive(16), second, **RULE, key=9) is False
    assert torch.equal(first, second)
    assert torch.equal(m, state[0])
    assert torch.equal(b, state[1])


# Nothing outside -----------------------------------------------------------------------------------------------------


def changed_bytes(before: Tensor, after: Tensor) -> set[int]:
    return set((before != after).nonzero().flatten().tolist())


def address(tensor: Tensor) -> int:
    """The byte of its allocation at which a tensor begins."""
    return int(tensor.storage_offset()) * tensor.element_size()


@each_backend
def test_encode_writes_its_own_words_and_no_others(backend: str) -> None:
    """Between two runs, before the first and after the last every byte stays, in the packets and in the state."""
    count = 500
    runs, size = cut(count, 4, first_word=3)
    generator = random(5)
    m, b = guarded(torch.full((16 * WORD,), 0.5)), guarded(torch.full((16 * WORD,), 0.75))
    packets = guarded(random_bytes(size, generator=generator))
    gradient = guarded(torch.randn(count, generator=generator))
    watched = [m, b, packets, gradient]
    before = [allocation(tensor).clone() for tensor in watched]
    with kernels_of(backend) as kernels:
        kernels.birder_encode(runs, gradient, m, b, everybody_alive(16), packets, **RULE, key=1)
    m_changed, b_changed, packets_changed, gradient_changed = (
        changed_bytes(old, allocation(tensor)) for old, tensor in zip(before, watched, strict=True)
    )
    words: set[int] = set()
    for _, _, elements, byte, _, _ in runs.tolist():
        words.update(range(byte, byte + 8 * -(-elements // WORD)))
    state = range(3 * WORD * 4, (3 + 8) * WORD * 4)
    assert packets_changed
    assert packets_changed <= {address(packets) + byte for byte in words}
    assert m_changed <= {address(m) + byte for byte in state}
    assert b_changed <= {address(b) + byte for byte in state}
    assert not gradient_changed


@each_backend
@pytest.mark.parametrize("low_dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 31, 33, 100])
def test_apply_writes_its_own_elements_and_no_others(backend: str, low_dtype: torch.dtype | None, count: int) -> None:
    x = guarded(torch.ones(count), elements_off=1)
    low = None if low_dtype is None else guarded(torch.ones(count, dtype=low_dtype), elements_off=1)
    answers = torch.full((16,), 255, dtype=torch.uint8)
    with kernels_of(backend) as kernels:
        kernels.birder_apply(whole(count), x, low, everybody_alive(2), answers, planes=1, workers=0, lr=0.25, decay=1.0)
    for tensor in (x, low):
        if tensor is not None:
            assert bool((tensor == 0.75).all())
            memory = allocation(tensor)
            assert bool((memory[: address(tensor)] == 0xA5).all())
            assert bool((memory[address(tensor) + count * tensor.element_size() :] == 0xA5).all())


@each_backend
@pytest.mark.parametrize("words", [1, 63, 64, 65, 130])
def test_votes_write_their_answer_and_nothing_else(backend: str, words: int) -> None:
    rows = guarded(random_bytes(3, 8 * words, generator=random(0)))
    sent = allocation(rows).clone()
    drawn = guarded(torch.zeros(8 * words, dtype=torch.uint8))
    most = guarded(torch.zeros(8 * words, dtype=torch.uint8))
    counted = guarded(torch.zeros(2 * 8 * words, dtype=torch.uint8))
    where: dict[str, Any] = {"first_word": 0, "words": words, "answer_byte": 0, "signal": None}
    with kernels_of(backend) as kernels:
        kernels.vote_bit(rows, 0, everybody_alive(words), answer=drawn, key=1, **where)
        kernels.vote_majority(rows, 0, everybody_alive(words), answer=most, casting=1, **where)
        kernels.vote_count(rows, 0, everybody_alive(words), answer=counted, planes=2, **where)
    assert torch.equal(allocation(rows), sent)
    for answer in (drawn, most, counted):
        memory = allocation(answer)
        assert bool((memory[: address(answer)] == 0xA5).all())
        assert bool((memory[address(answer) + answer.numel() :] == 0xA5).all())


# Beyond 2**32 --------------------------------------------------------------------------------------------------------


def vast(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros, of which only the pages that are touched take memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    except OSError as error:
        pytest.skip(f"this machine does not lend {count * dtype.itemsize >> 30} GiB of addresses: {error}")
    return torch.frombuffer(memory, dtype=dtype)


@pytest.mark.skipif(not hasattr(mmap, "MAP_ANONYMOUS"), reason="needs memory that is not there until it is touched")
@each_backend
def test_elements_beyond_two_to_the_32_have_draws_of_their_own(backend: str) -> None:
    """A parameter that lies across the boundary: u = 0, so that its bits are the signs of the draws."""
    first, count = 2**32 - 192, 320
    size = first + count
    m, b = vast(size, torch.bfloat16), vast(size, torch.bfloat16)
    active = vast(size // WORD, torch.int64)
    active[first // WORD :] = -1
    b[first:] = 1
    packets = torch.zeros(count // 8, dtype=torch.uint8)
    runs = torch.tensor([[first, 0, 128, 0, 0, 0], [first + 128, 128, count - 128, 16, 0, 0]])
    key = oracle.key(1, 0, 2, 3)
    with kernels_of(backend) as kernels:
        kernels.birder_encode(runs, None, m, b, active, packets, **RULE, key=key)
    bits = torch.from_numpy(oracle.worker_uniform(1, 2, 3, torch.arange(first, size).numpy()) < 0)
    sent = packets[:, None] >> torch.arange(8) & 1
    assert torch.equal(sent.flatten() == 1, bits)


@pytest.mark.skipif(not hasattr(mmap, "MAP_ANONYMOUS"), reason="needs memory that is not there until it is touched")
@each_backend
@pytest.mark.parametrize("first_word", [2**26 - 70, 2**30 - 140], ids=["across 2**32", "up to 2**36"])
def test_owners_draw_for_the_largest_model_there_may_be(backend: str, first_word: int) -> None:
    words, workers = 140, 3
    active = vast(first_word + words, torch.int64)
    active[first_word:] = -1
    elements = torch.arange(first_word * WORD, (first_word + words) * WORD)
    chosen = torch.from_numpy(oracle.drawn_worker(4, 5, workers, elements.numpy()))
    for worker in range(workers):
        rows = torch.zeros((workers, 8 * words), dtype=torch.uint8)
        rows[worker] = 255
        answer = torch.zeros(8 * words, dtype=torch.uint8)
        with kernels_of(backend) as kernels:
            kernels.vote_bit(
                rows,
                0,
                active,
                first_word=first_word,
                words=words,
                answer=answer,
                answer_byte=0,
                key=oracle.key(4, 1, 5),
                signal=None,
            )
        taken = answer[:, None] >> torch.arange(8) & 1
        assert torch.equal(taken.flatten() == 1, chosen == worker)

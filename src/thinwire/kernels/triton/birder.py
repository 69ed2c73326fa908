"""Birder's kernels: two averages and a sampled bit, the activation map, and the step."""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.modes import Gate
from thinwire.kernels.triton.common import (
    WORD,
    WORDS,
    count_if_open,
    device_of,
    floats_of,
    gate_of,
    has_tile,
    inside,
    jit,
    key_of,
    launch,
    load_master,
    narrow,
    need_on_device,
    number,
    number_at,
    pack,
    report,
    run_at,
    runs_on,
    store_master,
    tile,
    uniform,
    unpack,
    widen,
    words_of,
)

_MAP_WORDS = 512
"""Words of the activation map that a program updates."""


# The local rule -------------------------------------------------------------------------------------------------------


@triton.jit
def _absorb(
    m, b, at, whole, grad, grad_at, mask, bad, beta, rest, beta_b, rest_b, scale,
    HAS_GRAD: tl.constexpr, ON_DEVICE: tl.constexpr, AMSGRAD: tl.constexpr,
):  # fmt: skip
    """The two averages of whole words, as they are stored, with the gradient (if any) taken in where it is finite."""
    m_now, b_now = tl.load(m + at, mask=whole, other=0.0), tl.load(b + at, mask=whole, other=0.0)
    if HAS_GRAD:
        g = widen(tl.load(grad + grad_at, mask=mask, other=0.0)) * number_at(scale, ON_DEVICE)
        finite = tl.abs(g) < float("inf")
        report(bad, (finite == 0) & whole)
        m_old, b_old = widen(m_now), widen(b_now)
        m_new = m_old * beta + g * rest
        b_new = b_old * beta_b + tl.abs(g) * rest_b
        if AMSGRAD:
            b_new = tl.where(b_new > b_old, b_new, b_old)
        m_now, b_now = narrow(tl.where(finite, m_new, m_old), m), narrow(tl.where(finite, b_new, b_old), b)
        tl.store(m + at, m_now, mask=whole)
        tl.store(b + at, b_now, mask=whole)
    return widen(m_now), widen(b_now)


@jit(do_not_specialize=["beta", "rest", "beta_b", "rest_b", "level", "eps", "scale", "key"])
def _encode(
    runs, grad, m, b, active, packets, bad, beta, rest, beta_b, rest_b, level, eps, scale, key, shift,
    HAS_GRAD: tl.constexpr, ON_DEVICE: tl.constexpr, AMSGRAD: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    element, in_param, count, byte, _, _ = run_at(runs, tl.program_id(1))
    word, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            word_mask = inside(word * 64, count, full)
            m_now, b_now = _absorb(
                m, b, element - shift + offset, word_mask[:, None],
                grad, in_param + offset, inside(offset, count, full), bad, beta, rest, beta_b, rest_b, scale,
                HAS_GRAD, ON_DEVICE, AMSGRAD,
            )  # fmt: skip
            first = element + tl.program_id(0).to(tl.int64) * (WORDS * 64)
            votes = pack(m_now > uniform(key, first, element + offset) * ((b_now + eps) * level))
            activation_bits = pack((tl.abs(m_now) if AMSGRAD else tl.abs(b_now)) > eps)
            active_words = tl.load(active + element // 64 + word, mask=word_mask, other=0)
            tl.store(
                words_of(packets, byte) + word,
                (votes & active_words) | (activation_bits & ~active_words),
                mask=word_mask,
            )


def birder_encode(
    runs: Tensor,
    grad: Tensor | None,
    m: Tensor,
    b: Tensor,
    active: Tensor,
    packets: Tensor,
    *,
    beta: float,
    eps: float,
    scale: float | Tensor,
    amsgrad: bool,
    key: int,
    shift: int = 0,
    beta_b: float | None = None,
    level: float = 1.0,
    bad: Tensor,
) -> None:
    """See the reference."""
    device = device_of("birder_encode", "m", m)
    arguments.birder_encode(runs, grad, m, b, active, packets, shift, device)
    need_on_device("birder_encode", device, bad=bad, scale=scale)
    beta_b = beta if beta_b is None else beta_b
    table, grid = runs_on(device, runs)
    factor, on_device = number(scale)
    launch(
        _encode, grid, m,
        table, grad, m, b, active, packets, bad, float(beta), 1.0 - beta, float(beta_b), 1.0 - beta_b, float(level),
        float(eps), factor, key_of(key), shift,
        HAS_GRAD=grad is not None, ON_DEVICE=on_device, AMSGRAD=amsgrad, WORDS=WORDS,
    )  # fmt: skip


@jit(do_not_specialize=["beta", "rest", "beta_b", "rest_b", "level", "eps", "scale"])
def _direction(
    runs, grad, m, b, packets, bad, beta, rest, beta_b, rest_b, level, eps, scale, shift,
    HAS_GRAD: tl.constexpr, ON_DEVICE: tl.constexpr, AMSGRAD: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    element, in_param, count, byte, _, _ = run_at(runs, tl.program_id(1))
    word, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask = inside(offset, count, full)
            m_now, b_now = _absorb(
                m, b, element - shift + offset, inside(word * 64, count, full)[:, None],
                grad, in_param + offset, mask, bad, beta, rest, beta_b, rest_b, scale,
                HAS_GRAD, ON_DEVICE, AMSGRAD,
            )  # fmt: skip
            is_active = (tl.abs(m_now) if AMSGRAD else tl.abs(b_now)) > eps
            ratio = tl.div_rn(m_now, (b_now + eps) * level)
            ratio = tl.where(ratio > 1.0, 1.0, tl.where(ratio < -1.0, -1.0, ratio))
            u = tl.where(is_active, ratio, float("nan"))
            tl.store(floats_of(packets, byte) + offset, u, mask=mask)


def birder_direction(
    runs: Tensor,
    grad: Tensor | None,
    m: Tensor,
    b: Tensor,
    packets: Tensor,
    *,
    beta: float,
    eps: float,
    scale: float | Tensor,
    amsgrad: bool,
    shift: int = 0,
    beta_b: float | None = None,
    level: float = 1.0,
    bad: Tensor,
) -> None:
    """See the reference."""
    device = device_of("birder_direction", "m", m)
    arguments.birder_direction(runs, grad, m, b, packets, shift, device)
    need_on_device("birder_direction", device, bad=bad, scale=scale)
    beta_b = beta if beta_b is None else beta_b
    table, grid = runs_on(device, runs)
    factor, on_device = number(scale)
    launch(
        _direction, grid, m,
        table, grad, m, b, packets, bad, float(beta), 1.0 - beta, float(beta_b), 1.0 - beta_b, float(level),
        float(eps), factor, shift,
        HAS_GRAD=grad is not None, ON_DEVICE=on_device, AMSGRAD=amsgrad, WORDS=WORDS,
    )  # fmt: skip


# The activation map ---------------------------------------------------------------------------------------------------


@jit(do_not_specialize=["first_word", "phase", "eps"])
def _activity_refresh(
    state, first_word, shard_words, period, phase, eps, packets, stride, offset, shift, WORDS: tl.constexpr
):
    start = first_word + tl.program_id(1).to(tl.int64) * shard_words
    place, _ = tile(WORDS)
    word = start + (phase + period - start % period) % period + place * period
    mask = word < start + shard_words
    at = tl.multiple_of(word * 64 - shift, 64)[:, None] + tl.arange(0, 64)[None, :]
    is_active = tl.abs(widen(tl.load(state + at, mask=mask[:, None], other=0.0))) > eps
    to = words_of(packets, tl.program_id(1).to(tl.int64) * stride + offset)
    tl.store(to + place, pack(is_active), mask=mask)


def activity_refresh(
    state: Tensor,
    *,
    first_word: int,
    shard_words: int,
    shards: int,
    period: int,
    phase: int,
    eps: float,
    packets: Tensor,
    offset: int,
    shift: int = 0,
) -> None:
    """See the reference; `shift` is a multiple of 64."""
    device = device_of("activity_refresh", "state", state)
    arguments.activity_refresh(state, first_word, shard_words, shards, period, phase, packets, offset, shift, device)
    assert shift % WORD.value == 0
    refreshed = triton.cdiv(shard_words, period)
    launch(
        _activity_refresh, (triton.cdiv(refreshed, WORDS), shards), state,
        state, first_word, shard_words, period, phase, float(eps), packets, packets.stride(0), offset, shift,
        WORDS=WORDS,
    )  # fmt: skip


@jit(do_not_specialize=["first_word", "phase", "parameter"])
def _adopt(
    active, first_word, shard_words, answers, stride, byte, period, phase, gate, parameter,
    PLANES: tl.constexpr, GATED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    shard = tl.program_id(1).to(tl.int64)
    start = first_word + shard * shard_words
    place = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    mask = place < count_if_open(shard_words, gate, parameter, GATED)
    active_words = tl.load(active + start + place, mask=mask, other=0)
    answer_bits = words_of(answers, shard * stride + byte)
    for plane in tl.static_range(PLANES):
        active_words |= tl.load(answer_bits + plane * shard_words + place, mask=mask, other=0)
    after_first = place - (phase + period - start % period) % period
    refreshed = mask & (after_first >= 0) & (after_first % period == 0)
    refreshed_words = answer_bits + PLANES * shard_words
    active_words = tl.where(
        refreshed, tl.load(refreshed_words + after_first // period, mask=refreshed, other=0), active_words
    )
    tl.store(active + start + place, active_words, mask=mask)


def activity_update(
    active: Tensor,
    *,
    first_word: int,
    shard_words: int,
    answers: Tensor,
    byte: int,
    planes: int,
    period: int,
    phase: int,
    gate: Gate | None = None,
) -> None:
    """See the reference."""
    device = device_of("activity_update", "active", active)
    arguments.activity_update(active, first_word, shard_words, answers, byte, planes, period, phase, device)
    need_on_device("activity_update", device, gate=gate)
    opens, parameter, gated = gate_of(gate)
    launch(
        _adopt, (triton.cdiv(shard_words, _MAP_WORDS), answers.shape[0]), active,
        active, first_word, shard_words, answers, answers.stride(0), byte, period, phase, opens, parameter,
        PLANES=planes, GATED=gated, WORDS=_MAP_WORDS,
    )  # fmt: skip


# Steps ----------------------------------------------------------------------------------------------------------------


@triton.jit
def _move(x, low, at, mask, is_active, move, decay, HAS_LOW: tl.constexpr):
    old = load_master(x, low, at, mask, HAS_LOW)
    store_master(x, low, at, mask, tl.where(is_active, old * decay + move, old), HAS_LOW)


@jit(do_not_specialize=["workers", "rate", "decay", "parameter"])
def _birder_apply(
    runs, x, low, active, answers, workers, rate, decay, gate, parameter,
    PLANES: tl.constexpr, HAS_LOW: tl.constexpr, GATED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    element, in_param, count, byte, plane_bytes, _ = run_at(runs, tl.program_id(1))
    count = count_if_open(count, gate, parameter, GATED)
    word, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask, word_mask = inside(offset, count, full), inside(word * 64, count, full)
            votes = tl.zeros((WORDS, 64), dtype=tl.int32)
            for plane in tl.static_range(PLANES):
                bits = tl.load(words_of(answers, byte + plane * plane_bytes) + word, mask=word_mask, other=0)
                votes += unpack(bits).to(tl.int32) << plane
            move = (2 * votes - workers).to(tl.float32) * rate * -1.0
            is_active = unpack(tl.load(active + element // 64 + word, mask=word_mask, other=0))
            _move(x, low, in_param + offset, mask, is_active, move, decay, HAS_LOW)


def birder_apply(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    active: Tensor,
    answers: Tensor,
    *,
    planes: int,
    workers: int,
    lr: float,
    decay: float,
    gate: Gate | None = None,
) -> None:
    """See the reference."""
    device = device_of("birder_apply", "x", x)
    arguments.birder_apply(runs, x, low, active, answers, planes, device)
    need_on_device("birder_apply", device, gate=gate)
    table, grid = runs_on(device, runs)
    opens, parameter, gated = gate_of(gate)
    votes = workers or 1  # a sign is the vote of one
    launch(
        _birder_apply, grid, x,
        table, x, low, active, answers, votes, lr / votes, float(decay), opens, parameter,
        PLANES=planes, HAS_LOW=low is not None, GATED=gated, WORDS=WORDS,
    )  # fmt: skip


@jit(do_not_specialize=["lr", "decay", "parameter"])
def _dense_apply(
    runs, x, low, answers, lr, decay, gate, parameter,
    HAS_LOW: tl.constexpr, GATED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    _, in_param, count, byte, _, _ = run_at(runs, tl.program_id(1))
    count = count_if_open(count, gate, parameter, GATED)
    _, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask = inside(offset, count, full)
            u = tl.load(floats_of(answers, byte) + offset, mask=mask, other=0.0)
            _move(x, low, in_param + offset, mask, u == u, u * lr * -1.0, decay, HAS_LOW)


def dense_apply(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    answers: Tensor,
    *,
    lr: float,
    decay: float,
    gate: Gate | None = None,
) -> None:
    """See the reference."""
    device = device_of("dense_apply", "x", x)
    arguments.dense_apply(runs, x, low, answers, device)
    need_on_device("dense_apply", device, gate=gate)
    table, grid = runs_on(device, runs)
    opens, parameter, gated = gate_of(gate)
    launch(
        _dense_apply, grid, x,
        table, x, low, answers, float(lr), float(decay), opens, parameter,
        HAS_LOW=low is not None, GATED=gated, WORDS=WORDS,
    )  # fmt: skip

"""The kernels of signs with error feedback; see the reference."""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.modes import Gate, Output
from thinwire.kernels.triton.common import (
    LIMIT,
    WORDS,
    add_up,
    count_if_open,
    device_of,
    floats_of,
    gate_of,
    has_tile,
    inside,
    jit,
    launch,
    load_master,
    narrow,
    need_on_device,
    number,
    number_at,
    pack,
    report,
    room_for_sums,
    run_at,
    runs_on,
    signed,
    store_master,
    tile,
    unpack,
    widen,
    words_of,
    write_sum,
)


@triton.jit
def rest_of(state, scale):
    """What is left of a memory, in float32, when its sign has been sent with `scale`."""
    wide = widen(state)
    return wide - signed(wide >= 0, scale)


@triton.jit
def _keep_and_sign(c, at, mask, value, words, word, word_mask, sums, WORDS: tl.constexpr):
    """Store a memory, write the signs of what was stored, and the sum of their squares."""
    kept = narrow(value, c)
    tl.store(c + at, kept, mask=mask)
    wide = tl.where(mask, widen(kept), 0.0)
    tl.store(words + word, pack((wide >= 0) & mask), mask=word_mask)
    write_sum(sums, wide * wide, WORDS)


# A worker's signs -----------------------------------------------------------------------------------------------------


@jit(do_not_specialize=["beta", "weight", "scale"])
def _sign_encode(
    runs, grad, c, answer_words, packets, sent_scales, answer_scales, sums, room, bad, beta, weight, scale, shift,
    HAS_GRAD: tl.constexpr, ON_DEVICE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    element, in_param, count, byte, _, shard = run_at(runs, tl.program_id(1))
    sums += tl.program_id(1).to(tl.int64) * room
    word, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask, word_mask = inside(offset, count, full), inside(word * 64, count, full)
            at = element - shift + offset
            before = rest_of(tl.load(c + at, mask=mask, other=0.0), tl.load(sent_scales + shard))
            up = unpack(tl.load(answer_words + element // 64 + word, mask=word_mask, other=0))
            z = before + signed(up, beta * tl.load(answer_scales + shard))
            if HAS_GRAD:
                g = widen(tl.load(grad + in_param + offset, mask=mask, other=0.0)) * number_at(scale, ON_DEVICE)
                wish = z + g * weight
                good = tl.abs(wish) < LIMIT
                report(bad, (good == 0) & mask)
                z = tl.where(good, wish, z)
            _keep_and_sign(c, at, mask, z, words_of(packets, byte), word, word_mask, sums, WORDS)


def sign_encode(
    runs: Tensor,
    grad: Tensor | None,
    c: Tensor,
    answer_words: Tensor,
    packets: Tensor,
    *,
    sent_scales: Tensor,
    answer_scales: Tensor,
    sums: Tensor,
    beta: float,
    weight: float,
    scale: float | Tensor,
    shift: int,
    bad: Tensor,
) -> None:
    """See the reference."""
    device = device_of("sign_encode", "c", c)
    arguments.sign_encode(runs, grad, c, answer_words, packets, sent_scales, answer_scales, sums, shift, device)
    need_on_device("sign_encode", device, bad=bad, scale=scale)
    table, grid = runs_on(device, runs)
    by_tile = room_for_sums(grid, c.device)
    factor, on_device = number(scale)
    launch(
        _sign_encode, grid, c,
        table, grad, c, answer_words, packets, sent_scales, answer_scales, by_tile, by_tile.shape[-1], bad,
        float(beta), float(weight), factor, shift,
        HAS_GRAD=grad is not None, ON_DEVICE=on_device, WORDS=WORDS,
    )  # fmt: skip
    add_up(table, by_tile, sums)


@jit(do_not_specialize=["beta", "weight", "scale", "rate"])
def _momentum_encode(
    runs, grad, m, c, packets, sent_scales, sums, room, bad, beta, weight, scale, rate, shift,
    HAS_GRAD: tl.constexpr, ON_DEVICE: tl.constexpr, OUTPUT: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    element, in_param, count, byte, _, shard = run_at(runs, tl.program_id(1))
    word, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask, word_mask = inside(offset, count, full), inside(word * 64, count, full)
            at = element - shift + offset
            z = rest_of(tl.load(c + at, mask=mask, other=0.0), tl.load(sent_scales + shard))
            momentum = tl.load(m + element + offset, mask=mask, other=0.0)
            if HAS_GRAD:
                g = widen(tl.load(grad + in_param + offset, mask=mask, other=0.0)) * number_at(scale, ON_DEVICE)
                wish = momentum * beta + g * weight
                good = tl.abs(wish) < LIMIT
                report(bad, (good == 0) & mask)
                momentum = tl.where(good, wish, momentum)
                tl.store(m + element + offset, momentum, mask=mask)
                z = z + momentum * rate
            if OUTPUT == 1:
                to, of_run = words_of(packets, byte), sums + tl.program_id(1).to(tl.int64) * room
                _keep_and_sign(c, at, mask, z, to, word, word_mask, of_run, WORDS)
            else:
                tl.store(c + at, narrow(z, c), mask=mask)
            if OUTPUT == 2:
                tl.store(floats_of(packets, byte) + offset, momentum, mask=mask)


def momentum_encode(
    runs: Tensor,
    grad: Tensor | None,
    m: Tensor,
    c: Tensor,
    packets: Tensor | None,
    *,
    sent_scales: Tensor,
    sums: Tensor | None,
    beta: float,
    weight: float,
    scale: float | Tensor,
    rate: float,
    shift: int,
    output: int,
    bad: Tensor,
) -> None:
    """See the reference."""
    device = device_of("momentum_encode", "c", c)
    arguments.momentum_encode(runs, grad, m, c, packets, sent_scales, sums, shift, output, device)
    need_on_device("momentum_encode", device, bad=bad, scale=scale)
    table, grid = runs_on(device, runs)
    by_tile = room_for_sums(grid, c.device) if output == Output.SIGNS else None
    factor, on_device = number(scale)
    launch(
        _momentum_encode, grid, c,
        table, grad, m, c, packets, sent_scales, by_tile, 0 if by_tile is None else by_tile.shape[-1], bad,
        float(beta), float(weight), factor, float(rate), shift,
        HAS_GRAD=grad is not None, ON_DEVICE=on_device, OUTPUT=int(output), WORDS=WORDS,
    )  # fmt: skip
    if by_tile is not None:
        assert sums is not None
        add_up(table, by_tile, sums)


# The owner's answer ---------------------------------------------------------------------------------------------------


@jit(do_not_specialize=["workers", "share"])
def _sign_merge(
    runs, rows, row_bytes, workers, y, answer, scales, apart, last_scales, sums, room, share, shift,
    WORDS: tl.constexpr,
):  # fmt: skip
    element, _, count, byte, _, block = run_at(runs, tl.program_id(1))
    sums += tl.program_id(1).to(tl.int64) * room
    word, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask, word_mask = inside(offset, count, full), inside(word * 64, count, full)
            first = tl.load(words_of(rows, byte) + word, mask=word_mask, other=0)
            scale = scales + block
            total = signed(unpack(first), tl.load(scale))
            row = rows
            for worker in range(1, workers):  # noqa: B007 - `_` is a field of the run, of another type
                row += row_bytes
                scale += apart
                up = unpack(tl.load(words_of(row, byte) + word, mask=word_mask, other=0))
                total += signed(up, tl.load(scale))
            at = element - shift + offset
            z = total * share + rest_of(tl.load(y + at, mask=mask, other=0.0), tl.load(last_scales + block))
            _keep_and_sign(y, at, mask, z, words_of(answer, byte), word, word_mask, sums, WORDS)


def sign_merge(
    runs: Tensor,
    rows: Tensor,
    y: Tensor,
    answer: Tensor,
    *,
    scales: Tensor,
    last_scales: Tensor,
    sums: Tensor,
    shift: int,
) -> None:
    """See the reference."""
    device = device_of("sign_merge", "y", y)
    arguments.sign_merge(runs, rows, y, answer, scales, last_scales, sums, shift, device)
    table, grid = runs_on(device, runs)
    by_tile = room_for_sums(grid, y.device)
    launch(
        _sign_merge, grid, y,
        table, rows, rows.stride(0), rows.shape[0], y, answer, scales, scales.stride(0), last_scales,
        by_tile, by_tile.shape[-1], 1.0 / rows.shape[0], shift,
        WORDS=WORDS,
    )  # fmt: skip
    add_up(table, by_tile, sums)


# Steps ----------------------------------------------------------------------------------------------------------------


@jit(do_not_specialize=["rate", "decay", "momentum", "parameter"])
def _sign_apply(
    runs, x, low, p, answer_words, scales, anchor, m, rate, decay, momentum, gate, parameter,
    HAS_LOW: tl.constexpr, ANCHORED: tl.constexpr, HAS_M: tl.constexpr, GATED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    element, in_param, count, _, _, shard = run_at(runs, tl.program_id(1))
    count = count_if_open(count, gate, parameter, GATED)
    word, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask, word_mask = inside(offset, count, full), inside(word * 64, count, full)
            at = in_param + offset
            scale = tl.load(scales + shard)
            up = unpack(tl.load(answer_words + element // 64 + word, mask=word_mask, other=0))
            base = tl.load(anchor + at, mask=mask, other=0.0) if ANCHORED else load_master(x, low, at, mask, HAS_LOW)
            of_p = tl.load(p + element + offset, mask=mask, other=0.0)
            moved = base * decay + signed(up == 0, rate * scale) * of_p
            store_master(x, low, at, mask, tl.where(of_p > 0, moved, base), HAS_LOW)
            if HAS_M:
                tl.store(m + element + offset, signed(up, scale * momentum), mask=mask)


def sign_apply(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    p: Tensor,
    answer_words: Tensor,
    scales: Tensor,
    *,
    rate: float,
    decay: float,
    anchor: Tensor | None,
    m: Tensor | None,
    momentum: float,
    gate: Gate | None = None,
) -> None:
    """See the reference."""
    device = device_of("sign_apply", "x", x)
    arguments.sign_apply(runs, x, low, p, answer_words, scales, anchor, m, device)
    need_on_device("sign_apply", device, gate=gate)
    table, grid = runs_on(device, runs)
    opens, parameter, gated = gate_of(gate)
    launch(
        _sign_apply, grid, x,
        table, x, low, p, answer_words, scales, anchor, m, float(rate), float(decay), float(momentum), opens, parameter,
        HAS_LOW=low is not None, ANCHORED=anchor is not None, HAS_M=m is not None, GATED=gated, WORDS=WORDS,
    )  # fmt: skip


@jit(do_not_specialize=["rate", "decay", "parameter"])
def _step_apply(
    runs, x, low, p, values, anchor, rate, decay, gate, parameter,
    HAS_LOW: tl.constexpr, ANCHORED: tl.constexpr, GATED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    element, in_param, count, byte, _, _ = run_at(runs, tl.program_id(1))
    count = count_if_open(count, gate, parameter, GATED)
    _, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask = inside(offset, count, full)
            at = in_param + offset
            base = load_master(x, low, at, mask, HAS_LOW)
            if ANCHORED:
                tl.store(anchor + at, base, mask=mask)
            of_p = tl.load(p + element + offset, mask=mask, other=0.0)
            step = tl.load(floats_of(values, byte) + offset, mask=mask, other=0.0) * rate
            store_master(x, low, at, mask, tl.where(of_p > 0, base * decay - step * of_p, base), HAS_LOW)


def step_apply(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    p: Tensor,
    values: Tensor,
    *,
    rate: float,
    decay: float,
    anchor: Tensor | None,
    gate: Gate | None = None,
) -> None:
    """See the reference."""
    device = device_of("step_apply", "x", x)
    arguments.step_apply(runs, x, low, p, values, anchor, device)
    need_on_device("step_apply", device, gate=gate)
    table, grid = runs_on(device, runs)
    opens, parameter, gated = gate_of(gate)
    launch(
        _step_apply, grid, x,
        table, x, low, p, values, anchor, float(rate), float(decay), opens, parameter,
        HAS_LOW=low is not None, ANCHORED=anchor is not None, GATED=gated, WORDS=WORDS,
    )  # fmt: skip

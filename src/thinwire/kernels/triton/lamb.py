"""The kernels of LAMB; see the reference."""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.modes import Gate
from thinwire.kernels.triton.adam import average, average_square
from thinwire.kernels.triton.common import (
    WORDS,
    add_up,
    blocks_of,
    count_if_open,
    device_of,
    floats_of,
    gate_of,
    has_tile,
    in_order,
    inside,
    jit,
    launch,
    load_master,
    need_on_device,
    room_for_sums,
    run_at,
    runs_on,
    signed,
    store_master,
    sum_of,
    tile,
    tiles_to_sum,
    unpack,
    write_sum,
)

_SUMS = 3


@triton.jit
def _update(x, m, v, eps, unbias, correction, weight_decay):
    """LAMB's update; none where there is no variance."""
    update = tl.div_rn(m * unbias, tl.sqrt_rn(v) * correction + eps) + x * weight_decay
    return tl.where(v > 0, update, 0.0)


@jit(do_not_specialize=["beta1", "rest1", "beta2", "rest2", "eps", "unbias", "correction", "weight_decay"])
def _lamb_measure(
    runs, x, low, m, v, gradient, sums, room, beta1, rest1, beta2, rest2, eps, unbias, correction, weight_decay,
    HAS_LOW: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    element, in_param, count, byte, _, _ = run_at(runs, tl.program_id(1))
    sums += tl.program_id(1).to(tl.int64) * (3 * room)
    _, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask = inside(offset, count, full)
            here, at = element + offset, in_param + offset
            g = tl.load(floats_of(gradient, byte) + offset, mask=mask, other=0.0)
            momentum = average(tl.load(m + here, mask=mask, other=0.0), g, beta1, rest1)
            tl.store(m + here, momentum, mask=mask)
            variance = average_square(tl.load(v + here, mask=mask, other=0.0), g, beta2, rest2)
            tl.store(v + here, variance, mask=mask)
            old = load_master(x, low, at, mask, HAS_LOW)
            if HAS_LOW:
                tl.store(x + at, old, mask=mask)
            update = _update(old, momentum, variance, eps, unbias, correction, weight_decay)
            write_sum(sums, old * old, WORDS)
            write_sum(sums + room, update * update, WORDS)
            write_sum(sums + 2 * room, variance, WORDS)


def lamb_measure(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    m: Tensor,
    v: Tensor,
    gradient: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    unbias: float,
    correction: float,
    weight_decay: float,
    sums: Tensor,
) -> None:
    """See the reference."""
    device = device_of("lamb_measure", "x", x)
    arguments.lamb_measure(runs, x, low, m, v, gradient, sums, device)
    table, grid = runs_on(device, runs)
    by_tile = room_for_sums(grid, x.device, _SUMS)
    launch(
        _lamb_measure, grid, x,
        table, x, low, m, v, gradient, by_tile, by_tile.shape[-1],
        float(beta1), 1.0 - beta1, float(beta2), 1.0 - beta2,
        float(eps), float(unbias), float(correction), float(weight_decay),
        HAS_LOW=low is not None, WORDS=WORDS,
    )  # fmt: skip
    add_up(table, by_tile, sums)


@jit(do_not_specialize=["eps", "unbias", "correction", "weight_decay", "rate", "parameter"])
def _lamb_apply(
    runs, x, low, m, v, eps, unbias, correction, weight_decay, rate, gate, parameter,
    HAS_LOW: tl.constexpr, GATED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    element, in_param, count, _, _, _ = run_at(runs, tl.program_id(1))
    count = count_if_open(count, gate, parameter, GATED)
    _, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask = inside(offset, count, full)
            here, at = element + offset, in_param + offset
            old = tl.load(x + at, mask=mask, other=0.0)
            momentum = tl.load(m + here, mask=mask, other=0.0)
            variance = tl.load(v + here, mask=mask, other=0.0)
            update = _update(old, momentum, variance, eps, unbias, correction, weight_decay)
            store_master(x, low, at, mask, tl.where(variance > 0, old - update * rate, old), HAS_LOW)


def lamb_apply(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    m: Tensor,
    v: Tensor,
    *,
    eps: float,
    unbias: float,
    correction: float,
    weight_decay: float,
    rate: float,
    gate: Gate | None = None,
) -> None:
    """See the reference."""
    device = device_of("lamb_apply", "x", x)
    arguments.lamb_apply(runs, x, low, m, v, device)
    need_on_device("lamb_apply", device, gate=gate)
    table, grid = runs_on(device, runs)
    opens, parameter, gated = gate_of(gate)
    launch(
        _lamb_apply, grid, x,
        table, x, low, m, v, float(eps), float(unbias), float(correction), float(weight_decay), float(rate),
        opens, parameter,
        HAS_LOW=low is not None, GATED=gated, WORDS=WORDS,
    )  # fmt: skip


# 1-bit LAMB -----------------------------------------------------------------------------------------------------------


@jit(do_not_specialize=["shrink", "beta1", "inverse", "beta2", "rest2", "eps", "unbias", "weight_decay"])
def _onebit_lamb_measure(
    runs, x, low, p, w, answer_words, scales, previous_words, previous_scales, sums, room,
    shrink, beta1, inverse, beta2, rest2, eps, unbias, weight_decay,
    HAS_LOW: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    element, in_param, count, _, _, shard = run_at(runs, tl.program_id(1))
    sums += tl.program_id(1).to(tl.int64) * (3 * room)
    word, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask, word_mask = inside(offset, count, full), inside(word * 64, count, full)
            here, at = element + offset, in_param + offset
            old = load_master(x, low, at, mask, HAS_LOW)
            if HAS_LOW:
                tl.store(x + at, old, mask=mask)
            of_p = tl.load(p + here, mask=mask, other=0.0)
            moves = of_p > 0
            up = unpack(tl.load(answer_words + element // 64 + word, mask=word_mask, other=0))
            was_up = unpack(tl.load(previous_words + element // 64 + word, mask=word_mask, other=0))
            momentum = signed(up, tl.load(scales + shard) * shrink)
            kept = signed(was_up, (tl.load(previous_scales + shard) * shrink) * beta1)
            variance = tl.load(w + here, mask=mask, other=0.0)
            fresh = average_square(variance, (momentum - kept) * inverse, beta2, rest2)
            variance = tl.where(moves, fresh, variance)
            tl.store(w + here, variance, mask=mask)
            direction = tl.where(moves, (momentum * unbias) * of_p, 0.0)
            update = tl.where(moves, direction + old * weight_decay, 0.0)
            write_sum(sums, direction * direction, WORDS)
            write_sum(sums + room, update * update, WORDS)
            factor = tl.where(moves, tl.div_rn(1.0, of_p * (tl.sqrt_rn(variance) + eps)), 0.0)
            # None is negative, so their bits have their order; and NaN, its sign taken away, is the largest.
            bits = factor.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            largest = tl.cast(tl.max(tl.max(bits, axis=1), axis=0), tl.float32, bitcast=True)
            tl.store(sums + 2 * room + tl.program_id(0), largest.to(tl.float64))


@jit()
def _add_up_and_find_largest(runs, tiles, sums, room, AT_ONCE: tl.constexpr, WORDS: tl.constexpr):
    numbers, count = tiles_to_sum(runs, tiles, room, WORDS)
    to = sums + 3 * tl.program_id(0) + tl.program_id(1)
    if tl.program_id(1) < 2:
        tl.store(to, in_order(numbers, count))
    else:
        factors = numbers.to(tl.pointer_type(tl.int64))
        largest = tl.zeros((AT_ONCE,), dtype=tl.int64)
        for first in range(0, count, AT_ONCE):
            at = first + tl.arange(0, AT_ONCE)
            # A NaN may have got its sign back when it was widened.
            bits = tl.load(factors + at, mask=at < count, other=0) & 0x7FFFFFFFFFFFFFFF
            largest = tl.maximum(largest, bits)
        tl.store(to, tl.cast(tl.max(largest, axis=0), tl.float64, bitcast=True))


def onebit_lamb_measure(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    p: Tensor,
    w: Tensor,
    answer_words: Tensor,
    scales: Tensor,
    previous_words: Tensor,
    previous_scales: Tensor,
    *,
    shrink: float,
    beta1: float,
    beta2: float,
    eps: float,
    unbias: float,
    weight_decay: float,
    sums: Tensor,
) -> None:
    """See the reference."""
    device = device_of("onebit_lamb_measure", "x", x)
    arguments.onebit_lamb_measure(
        runs, x, low, p, w, answer_words, scales, previous_words, previous_scales, sums, device
    )
    table, grid = runs_on(device, runs)
    by_tile = room_for_sums(grid, x.device, _SUMS)
    room = by_tile.shape[-1]
    launch(
        _onebit_lamb_measure, grid, x,
        table, x, low, p, w, answer_words, scales, previous_words, previous_scales, by_tile, room,
        float(shrink), float(beta1), 1.0 / (1.0 - beta1), float(beta2), 1.0 - beta2,
        float(eps), float(unbias), float(weight_decay),
        HAS_LOW=low is not None, WORDS=WORDS,
    )  # fmt: skip
    grid = (runs.shape[0], _SUMS)
    launch(_add_up_and_find_largest, grid, sums, table, by_tile, sums, room, AT_ONCE=256, WORDS=WORDS, num_warps=1)


# A norm ---------------------------------------------------------------------------------------------------------------


@jit(do_not_specialize=["count"])
def _squares(values, count, sums, WORDS: tl.constexpr):
    _, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            numbers = tl.load(values + offset, mask=inside(offset, count, full), other=0.0)
            write_sum(sums, numbers * numbers, WORDS)


def square_sum(values: Tensor) -> Tensor:
    """See the reference; the sum stays on the device, a float64 of no dimensions."""
    device = device_of("square_sum", "values", values)
    arguments.square_sum(values, device)
    count = values.numel()
    by_tile = torch.empty(blocks_of(count), dtype=torch.float64, device=values.device)
    launch(_squares, (blocks_of(count),), values, values, count, by_tile, WORDS=WORDS)
    return sum_of(by_tile)

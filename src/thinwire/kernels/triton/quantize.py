"""The kernels of quantised blocks; see the reference."""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.triton.common import (
    LIMIT,
    WORDS,
    add_up,
    device_of,
    draw,
    has_tile,
    inside,
    jit,
    key_of,
    launch,
    narrow,
    need_on_device,
    number,
    number_at,
    report,
    room_for_sums,
    runs_on,
    tile,
    widen,
    write_sum,
)


@triton.jit
def _run_at(runs, number):
    """The fields of a run. Its byte is any, as a word has any even number of bytes."""
    run = runs + 6 * number
    element, in_param = tl.multiple_of(tl.load(run), 64), tl.multiple_of(tl.load(run + 1), 64)
    return element, in_param, tl.load(run + 2), tl.load(run + 3)


@triton.jit
def _zero(BITS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The code of the value 0; between two codes where zero is no level."""
    return (1 << (BITS - 1)) - 1.0 if BITS > 2 or STOCHASTIC else ((1 << BITS) - 1) / 2.0


@triton.jit
def _scales(
    size, offset, count, spread,
    BITS: tl.constexpr, BLOCK: tl.constexpr, STOCHASTIC: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The bits of the scales of blocks in bfloat16, `(WORDS, blocks)`; `size` has the magnitudes of a tile."""
    blocks: tl.constexpr = 64 // BLOCK
    if BITS > 2 or STOCHASTIC:
        largest = tl.max(tl.reshape(size, (WORDS, blocks, BLOCK)), axis=2)
        raw = tl.div_rn(largest, tl.full((WORDS, blocks), (1 << (BITS - 1)) - 1.0, tl.float32))
    else:
        sums = tl.reshape(size, (WORDS * blocks, BLOCK))
        for i in tl.static_range(6):
            if (BLOCK >> i) > 1:
                sums = tl.sum(tl.reshape(sums, (WORDS * blocks, 2, BLOCK >> (i + 1))), axis=1)
        first = tl.min(tl.reshape(offset, (WORDS, blocks, BLOCK)), axis=2)
        there = tl.minimum(tl.maximum(count - first, 1), BLOCK).to(tl.float32)
        raw = tl.div_rn(tl.reshape(sums, (WORDS, blocks)), there) * spread
    bits = raw.to(tl.uint32, bitcast=True)
    rounding = 0xFFFF if STOCHASTIC else 0x7FFF + ((bits >> 16) & 1)
    return tl.where(raw < 7.52316384526264e-37, 0, (bits + rounding) >> 16)  # 2^-120


@triton.jit
def _spread_out(scales, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """A number per block for each of its elements."""
    blocks: tl.constexpr = 64 // BLOCK
    return tl.reshape(tl.broadcast_to(scales[:, :, None], (WORDS, blocks, BLOCK)), (WORDS, 64))


@triton.jit
def _store_plane(to, word, mask, codes, WIDTH: tl.constexpr, word_bytes: tl.constexpr, WORDS: tl.constexpr):
    parts = tl.reshape(codes & ((1 << WIDTH) - 1), (WORDS, 8 // WIDTH, 8 * WIDTH))
    shifted = parts << (tl.arange(0, 8 // WIDTH) * WIDTH)[None, :, None]
    at = word[:, None] * word_bytes + tl.arange(0, 8 * WIDTH)[None, :]
    tl.store(to + at, tl.sum(shifted, axis=1).to(tl.uint8), mask=mask[:, None])


@triton.jit
def _load_plane(codes, word, mask, WIDTH: tl.constexpr, word_bytes: tl.constexpr):
    j = tl.arange(0, 64)
    at = word[:, None] * word_bytes + (j % (8 * WIDTH))[None, :]
    byte = tl.load(codes + at, mask=mask[:, None], other=0).to(tl.int32)
    return (byte >> (j // (8 * WIDTH) * WIDTH)[None, :]) & ((1 << WIDTH) - 1)


@triton.jit
def _values(packet, word, mask, BITS: tl.constexpr, BLOCK: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The values of words, which begin at the pointer `packet`."""
    word_bytes: tl.constexpr = 2 * (64 // BLOCK) + 8 * BITS
    at = packet + word[:, None] * word_bytes + (2 * (tl.arange(0, 64) // BLOCK))[None, :]
    low = tl.load(at, mask=mask[:, None], other=0).to(tl.uint32)
    high = tl.load(at + 1, mask=mask[:, None], other=0).to(tl.uint32)
    scale = ((low << 16) | (high << 24)).to(tl.float32, bitcast=True)
    codes = packet + 2 * (64 // BLOCK)
    if BITS == 3:
        code = _load_plane(codes, word, mask, 2, word_bytes) | (_load_plane(codes + 16, word, mask, 1, word_bytes) << 2)
    else:
        code = _load_plane(codes, word, mask, BITS, word_bytes)
    return (code.to(tl.float32) - _zero(BITS, STOCHASTIC)) * scale


@triton.jit
def _quantize(
    c, packet, word, word_mask, offset, element, count, spread, key,
    BITS: tl.constexpr, BLOCK: tl.constexpr, STOCHASTIC: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Write the scales and codes of a tile, and return the values that they stand for."""
    blocks: tl.constexpr = 64 // BLOCK
    word_bytes: tl.constexpr = 2 * blocks + 8 * BITS
    top: tl.constexpr = (1 << (BITS - 1)) - 1
    sent = _scales(tl.abs(c), offset, count, spread, BITS, BLOCK, STOCHASTIC, WORDS).to(tl.uint32)
    at = packet + word[:, None] * word_bytes + 2 * tl.arange(0, blocks)[None, :]
    tl.store(at, (sent & 0xFF).to(tl.uint8), mask=word_mask[:, None])
    tl.store(at + 1, (sent >> 8).to(tl.uint8), mask=word_mask[:, None])
    scales = (sent << 16).to(tl.float32, bitcast=True)
    inverses = tl.where(scales > 0, tl.div_rn(1.0, tl.where(scales > 0, scales, 1.0)), 0.0)
    scale, x = _spread_out(scales, BLOCK, WORDS), c * _spread_out(inverses, BLOCK, WORDS)
    if STOCHASTIC:
        first = element + tl.program_id(0).to(tl.int64) * (WORDS * 64)
        r = (draw(key, first, element + offset) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
        y = x + r
        level = y.to(tl.int32)  # toward zero; GPUs' floor is not used, as it takes subnormal numbers for zero
        level -= (level.to(tl.float32) > y).to(tl.int32)
        code = tl.minimum(tl.maximum(level, -top), top) + top
    elif BITS > 2:
        code = ((x + 12582912.0) - 12582912.0).to(tl.int32) + top  # to the nearest, and from the middle to the even one
    elif BITS == 2:
        code = (x >= -1.0).to(tl.int32) + (x >= 0.0).to(tl.int32) + (x >= 1.0).to(tl.int32)
    else:
        code = (x >= 0.0).to(tl.int32)
    codes = packet + 2 * blocks
    if BITS == 3:
        _store_plane(codes, word, word_mask, code, 2, word_bytes, WORDS)
        _store_plane(codes + 16, word, word_mask, code >> 2, 1, word_bytes, WORDS)
    else:
        _store_plane(codes, word, word_mask, code, BITS, word_bytes, WORDS)
    return (code.to(tl.float32) - _zero(BITS, STOCHASTIC)) * scale


@triton.jit
def _bounded(wish, before):
    """`wish`, but `before` where that is NaN or too large, and zero where both are; and where it is."""
    good = tl.abs(wish) < LIMIT
    return tl.where(good, wish, tl.where(tl.abs(before) < LIMIT, before, 0.0)), good


@jit(do_not_specialize=["spread", "scale", "key"])
def _quantize_encode(
    runs, grad, residual, packets, sums, room, bad, spread, scale, key, shift,
    HAS_GRAD: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SUMS: tl.constexpr, ON_DEVICE: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, STOCHASTIC: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    element, in_param, count, byte = _run_at(runs, tl.program_id(1))
    word, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask, word_mask = inside(offset, count, full), inside(word * 64, count, full)
            at = element - shift + offset
            before = tl.zeros((WORDS, 64), tl.float32)
            if HAS_RESIDUAL:
                before = widen(tl.load(residual + at, mask=mask, other=0.0))
            wish = before
            if HAS_GRAD:
                g = widen(tl.load(grad + in_param + offset, mask=mask, other=0.0))
                wish = before + g * number_at(scale, ON_DEVICE)
            c, good = _bounded(wish, before)
            report(bad, (good == 0) & mask)
            c = tl.where(mask, c, 0.0)
            values = _quantize(
                c, packets + byte, word, word_mask, offset, element, count, spread, key, BITS, BLOCK, STOCHASTIC, WORDS
            )
            rest = tl.where(mask, c - values, 0.0)
            if HAS_RESIDUAL:
                tl.store(residual + at, narrow(rest, residual), mask=mask)
            if HAS_SUMS:
                of_run = sums + tl.program_id(1).to(tl.int64) * (2 * room)
                write_sum(of_run, c * c, WORDS)
                write_sum(of_run + room, rest * rest, WORDS)


def quantize_encode(
    runs: Tensor,
    grad: Tensor | None,
    residual: Tensor | None,
    packets: Tensor,
    *,
    sums: Tensor | None,
    bits: int,
    block: int,
    spread: float,
    scale: float | Tensor,
    shift: int,
    stochastic: bool = False,
    key: int = 0,
    bad: Tensor,
) -> None:
    """See the reference."""
    device = device_of("quantize_encode", "packets", packets)
    arguments.quantize_encode(runs, grad, residual, packets, sums, bits, block, spread, shift, stochastic, device)
    need_on_device("quantize_encode", device, bad=bad, scale=scale)
    table, grid = runs_on(device, runs)
    by_tile = None if sums is None else room_for_sums(grid, packets.device, 2)
    factor, on_device = number(scale)
    launch(
        _quantize_encode, grid, packets,
        table, grad, residual, packets, by_tile, 0 if by_tile is None else by_tile.shape[-1], bad,
        float(spread), factor, key_of(key), shift,
        HAS_GRAD=grad is not None, HAS_RESIDUAL=residual is not None, HAS_SUMS=sums is not None, ON_DEVICE=on_device,
        BITS=bits, BLOCK=block, STOCHASTIC=bool(stochastic), WORDS=WORDS,
    )  # fmt: skip
    if by_tile is not None:
        assert sums is not None
        add_up(table, by_tile, sums)


@jit(do_not_specialize=["workers", "share", "spread", "key"])
def _quantize_merge(
    runs, rows, row_bytes, workers, residual, answer, share, spread, key, shift,
    HAS_RESIDUAL: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, STOCHASTIC: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    element, _, count, byte = _run_at(runs, tl.program_id(1))
    word, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask, word_mask = inside(offset, count, full), inside(word * 64, count, full)
            total = _values(rows + byte, word, word_mask, BITS, BLOCK, STOCHASTIC)
            row = rows
            for _worker in range(1, workers):
                row += row_bytes
                total += _values(row + byte, word, word_mask, BITS, BLOCK, STOCHASTIC)
            at = element - shift + offset
            before = tl.zeros((WORDS, 64), tl.float32)
            if HAS_RESIDUAL:
                before = widen(tl.load(residual + at, mask=mask, other=0.0))
            y, _good = _bounded(total * share + before, before)
            y = tl.where(mask, y, 0.0)
            values = _quantize(
                y, answer + byte, word, word_mask, offset, element, count, spread, key, BITS, BLOCK, STOCHASTIC, WORDS
            )
            if HAS_RESIDUAL:
                tl.store(residual + at, narrow(y - values, residual), mask=mask)


def quantize_merge(
    runs: Tensor,
    rows: Tensor,
    residual: Tensor | None,
    answer: Tensor,
    *,
    bits: int,
    block: int,
    spread: float,
    shift: int,
    stochastic: bool = False,
    key: int = 0,
) -> None:
    """See the reference."""
    device = device_of("quantize_merge", "answer", answer)
    arguments.quantize_merge(runs, rows, residual, answer, bits, block, spread, shift, stochastic, device)
    table, grid = runs_on(device, runs)
    launch(
        _quantize_merge, grid, answer,
        table, rows, rows.stride(0), rows.shape[0], residual, answer,
        1.0 / rows.shape[0], float(spread), key_of(key), shift,
        HAS_RESIDUAL=residual is not None, BITS=bits, BLOCK=block, STOCHASTIC=bool(stochastic), WORDS=WORDS,
    )  # fmt: skip


@jit(do_not_specialize=["weight"])
def _quantize_decode(
    runs, packets, out, weight,
    BITS: tl.constexpr, BLOCK: tl.constexpr, STOCHASTIC: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    _, in_param, count, byte = _run_at(runs, tl.program_id(1))
    word, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask, word_mask = inside(offset, count, full), inside(word * 64, count, full)
            values = _values(packets + byte, word, word_mask, BITS, BLOCK, STOCHASTIC)
            tl.store(out + in_param + offset, narrow(values * weight, out), mask=mask)


def quantize_decode(
    runs: Tensor,
    packets: Tensor,
    out: Tensor,
    *,
    bits: int,
    block: int,
    weight: float,
    stochastic: bool = False,
) -> None:
    """See the reference."""
    device = device_of("quantize_decode", "out", out)
    arguments.quantize_decode(runs, packets, out, bits, block, stochastic, device)
    table, grid = runs_on(device, runs)
    launch(
        _quantize_decode, grid, out,
        table, packets, out, float(weight),
        BITS=bits, BLOCK=block, STOCHASTIC=bool(stochastic), WORDS=WORDS,
    )  # fmt: skip

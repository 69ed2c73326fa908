"""The kernels of Markov compression; see the reference."""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.modes import LARGEST
from thinwire.kernels.triton.common import (
    LIMIT,
    WORDS,
    add_up,
    device_of,
    has_tile,
    inside,
    jit,
    launch,
    need_on_device,
    number,
    number_at,
    pack,
    report,
    room_for_sums,
    run_at,
    runs_on,
    signed,
    tile,
    unpack,
    widen,
    words_of,
    write_sum,
)

_SUMS = 3
_WARPS = 8
"""Twice as many as usual: the registers of a thread do not hold 16 elements of all these tensors."""


@triton.jit
def _target(
    grad, grad_at, m, at, mask, beta, weight, scale, largest,
    HAS_GRAD: tl.constexpr, HAS_M: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """The gradient, or the momentum that took it, and where it was taken."""
    fit = mask
    target = tl.load(m + at, mask=mask, other=0.0) if HAS_M else tl.zeros(mask.shape, dtype=tl.float32)
    if HAS_GRAD:
        g = widen(tl.load(grad + grad_at, mask=mask, other=0.0)) * number_at(scale, ON_DEVICE)
        if HAS_M:
            new = target * beta + g * weight
            fit = (tl.abs(new) < LIMIT) & (tl.abs(g) <= largest)
            target = tl.where(fit, new, target)
            tl.store(m + at, target, mask=mask)
        else:
            target = tl.where(tl.abs(g) <= largest, g, float("nan"))  # callers refuse NaN
    return target, fit


@triton.jit
def _write_sums(sums, word, word_mask, room, change, is_active, WORDS: tl.constexpr):
    """The sums of a tile over active elements: magnitudes, squares, and their number."""
    write_sum(sums, tl.where(is_active, tl.abs(change), 0.0), WORDS)
    write_sum(sums + room, tl.where(is_active, change * change, 0.0), WORDS)
    number = tl.sum(tl.sum(is_active.to(tl.int32), axis=1), axis=0)
    tl.store(sums + 2 * room + tl.program_id(0), number.to(tl.float64))


@jit(do_not_specialize=["beta", "weight", "scale", "largest"])
def _markov_encode(
    runs, grad, m, known, sent_words, nonzero, sent_mask, active, packets, sent_scales, sums, room, bad,
    beta, weight, scale, largest, shift,
    HAS_GRAD: tl.constexpr, HAS_M: tl.constexpr, ON_DEVICE: tl.constexpr, MODE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    element, in_param, count, byte, _, shard = run_at(runs, tl.program_id(1))
    sums += tl.program_id(1).to(tl.int64) * (3 * room)
    word, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask, word_mask = inside(offset, count, full), inside(word * 64, count, full)
            at, own = element - shift + offset, (element - shift) // 64 + word
            is_active = unpack(tl.load(active + element // 64 + word, mask=word_mask, other=0)) & mask
            here = tl.load(known + at, mask=mask, other=0.0)
            if MODE == 2:
                target, taken, before = here, mask, tl.zeros(mask.shape, dtype=tl.float32)
            else:
                target, taken = _target(
                    grad, in_param + offset, m, at, mask, beta, weight, scale, largest, HAS_GRAD, HAS_M, ON_DEVICE
                )
                up = unpack(tl.load(sent_words + own, mask=word_mask, other=0))
                counts = unpack(tl.load(sent_mask + element // 64 + word, mask=word_mask, other=0))
                before = tl.where(counts, here + signed(up, tl.load(sent_scales + shard)), here)
            change = target - before
            fit = tl.abs(change) < LIMIT
            if HAS_GRAD:
                report(bad, ((fit & taken) == 0) & mask)
            target, change = tl.where(fit, target, before), tl.where(fit, change, 0.0)
            has_target = (target != 0) & mask
            signs = pack((is_active & (change >= 0)) | ((is_active == 0) & has_target))
            tl.store(words_of(packets, byte) + word, signs, mask=word_mask)
            tl.store(sent_words + own, signs, mask=word_mask)
            tl.store(nonzero + own, tl.cast(tl.max(has_target.to(tl.int32), axis=1), tl.uint8), mask=word_mask)
            _write_sums(sums, word, word_mask, room, change, is_active, WORDS)
            if MODE == 1 and not HAS_M:
                before = tl.where(is_active, before, target)
            tl.store(known + at, before, mask=mask)


def markov_encode(
    runs: Tensor,
    grad: Tensor | None,
    m: Tensor | None,
    known: Tensor,
    sent_words: Tensor,
    nonzero: Tensor,
    sent_mask: Tensor,
    active: Tensor,
    packets: Tensor,
    *,
    sent_scales: Tensor,
    sums: Tensor,
    beta: float,
    weight: float,
    scale: float | Tensor,
    shift: int,
    mode: int,
    largest: float = LARGEST,
    bad: Tensor,
) -> None:
    """See the reference."""
    device = device_of("markov_encode", "known", known)
    arguments.markov_encode(
        runs, grad, m, known, sent_words, nonzero, sent_mask, active, packets, sent_scales, sums, shift, device
    )
    need_on_device("markov_encode", device, bad=bad, scale=scale)
    table, grid = runs_on(device, runs)
    by_tile = room_for_sums(grid, known.device, _SUMS)
    factor, on_device = number(scale)
    launch(
        _markov_encode, grid, known,
        table, grad, m, known, sent_words, nonzero, sent_mask, active, packets, sent_scales,
        by_tile, by_tile.shape[-1], bad,
        float(beta), float(weight), factor, float(largest), shift,
        HAS_GRAD=grad is not None, HAS_M=m is not None, ON_DEVICE=on_device, MODE=int(mode), WORDS=WORDS,
        num_warps=_WARPS,
    )  # fmt: skip
    add_up(table, by_tile, sums)


@jit(do_not_specialize=["workers", "share"])
def _markov_merge(
    runs, rows, row_bytes, workers, mean, g, active, answer, scales, sums, room, share, shift, WORDS: tl.constexpr
):
    element, _, count, byte, _, _ = run_at(runs, tl.program_id(1))
    sums += tl.program_id(1).to(tl.int64) * (3 * room)
    word, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask, word_mask = inside(offset, count, full), inside(word * 64, count, full)
            any_word = tl.load(words_of(rows, byte) + word, mask=word_mask, other=0)
            total = signed(unpack(any_word), tl.load(scales))
            row = rows
            for worker in range(1, workers):
                row += row_bytes
                words = tl.load(words_of(row, byte) + word, mask=word_mask, other=0)
                total += signed(unpack(words), tl.load(scales + worker))
                any_word |= words
            at = element - shift + offset
            is_active = unpack(tl.load(active + element // 64 + word, mask=word_mask, other=0)) & mask
            here = tl.load(mean + at, mask=mask, other=0.0)
            here = tl.where(is_active, here + total * share, here)
            tl.store(mean + at, here, mask=mask)
            change = here - tl.load(g + element + offset, mask=mask, other=0.0)
            signs = pack((is_active & (change >= 0)) | ((is_active == 0) & unpack(any_word) & mask))
            tl.store(words_of(answer, byte) + word, signs, mask=word_mask)
            _write_sums(sums, word, word_mask, room, change, is_active, WORDS)


def markov_merge(
    runs: Tensor,
    rows: Tensor,
    mean: Tensor,
    g: Tensor,
    active: Tensor,
    answer: Tensor,
    *,
    scales: Tensor,
    sums: Tensor,
    shift: int,
) -> None:
    """See the reference."""
    device = device_of("markov_merge", "mean", mean)
    arguments.markov_merge(runs, rows, mean, g, active, answer, scales, sums, shift, device)
    table, grid = runs_on(device, runs)
    by_tile = room_for_sums(grid, mean.device, _SUMS)
    launch(
        _markov_merge, grid, mean,
        table, rows, rows.stride(0), rows.shape[0], mean, g, active, answer, scales, by_tile, by_tile.shape[-1],
        1.0 / rows.shape[0], shift,
        WORDS=WORDS, num_warps=_WARPS,
    )  # fmt: skip
    add_up(table, by_tile, sums)


@jit(do_not_specialize=["beta", "weight", "scale", "largest"])
def _markov_difference(
    runs, grad, m, known, c, bad, beta, weight, scale, largest, shift,
    HAS_GRAD: tl.constexpr, HAS_M: tl.constexpr, ON_DEVICE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    element, in_param, count, _, _, _ = run_at(runs, tl.program_id(1))
    _, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask = inside(offset, count, full)
            at = element - shift + offset
            target, taken = _target(
                grad, in_param + offset, m, at, mask, beta, weight, scale, largest, HAS_GRAD, HAS_M, ON_DEVICE
            )
            change = target - tl.load(known + at, mask=mask, other=0.0)
            fit = tl.abs(change) < LIMIT
            tl.store(c + at, tl.where(fit, change, 0.0), mask=mask)
            if HAS_GRAD:
                report(bad, ((fit & taken) == 0) & mask)


def markov_difference(
    runs: Tensor,
    grad: Tensor | None,
    m: Tensor | None,
    known: Tensor,
    c: Tensor,
    *,
    beta: float,
    weight: float,
    scale: float | Tensor,
    shift: int,
    largest: float = LARGEST,
    bad: Tensor,
) -> None:
    """See the reference."""
    device = device_of("markov_difference", "c", c)
    arguments.markov_difference(runs, grad, m, known, c, shift, device)
    need_on_device("markov_difference", device, bad=bad, scale=scale)
    table, grid = runs_on(device, runs)
    factor, on_device = number(scale)
    launch(
        _markov_difference, grid, c,
        table, grad, m, known, c, bad, float(beta), float(weight), factor, float(largest), shift,
        HAS_GRAD=grad is not None, HAS_M=m is not None, ON_DEVICE=on_device, WORDS=WORDS,
    )  # fmt: skip

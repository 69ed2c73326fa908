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
    has_tile,
    home_of,
    inside,
    jit,
    launch,
    need_of_device,
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
"""Twice as many as usual: a thread could not keep 16 elements of all that there is to know in its registers."""


@triton.jit
def _meant(
    grad, grad_at, m, at, mask, beta, weight, scale, largest,
    HAS_GRAD: tl.constexpr, HAS_M: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """The gradient, or the momentum with it, and where the momentum took it."""
    fit = mask
    meant = tl.load(m + at, mask=mask, other=0.0) if HAS_M else tl.zeros(mask.shape, dtype=tl.float32)
    if HAS_GRAD:
        g = widen(tl.load(grad + grad_at, mask=mask, other=0.0)) * number_at(scale, ON_DEVICE)
        if HAS_M:
            wish = meant * beta + g * weight
            fit = (tl.abs(wish) < LIMIT) & (tl.abs(g) <= largest)
            meant = tl.where(fit, wish, meant)
            tl.store(m + at, meant, mask=mask)
        else:
            meant = tl.where(tl.abs(g) <= largest, g, float("nan"))  # which the callers refuse
    return meant, fit


@triton.jit
def _write_sums(sums, word, word_mask, room, change, living, WORDS: tl.constexpr):
    """The sums of a tile, of magnitudes, of squares and of the living; `living` are of the run."""
    write_sum(sums, tl.where(living, tl.abs(change), 0.0), WORDS)
    write_sum(sums + room, tl.where(living, change * change, 0.0), WORDS)
    number = tl.sum(tl.sum(living.to(tl.int32), axis=1), axis=0)
    tl.store(sums + 2 * room + tl.program_id(0), number.to(tl.float64))


@jit(do_not_specialize=["beta", "weight", "scale", "largest"])
def _markov_encode(
    runs, grad, m, known, said, busy, spoke, active, packets, sent_scales, sums, room, bad,
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
            living = unpack(tl.load(active + element // 64 + word, mask=word_mask, other=0)) & mask
            here = tl.load(known + at, mask=mask, other=0.0)
            if MODE == 2:
                meant, taken, before = here, mask, tl.zeros(mask.shape, dtype=tl.float32)
            else:
                meant, taken = _meant(
                    grad, in_param + offset, m, at, mask, beta, weight, scale, largest, HAS_GRAD, HAS_M, ON_DEVICE
                )
                up = unpack(tl.load(said + own, mask=word_mask, other=0))
                spoken = unpack(tl.load(spoke + element // 64 + word, mask=word_mask, other=0))
                before = tl.where(spoken, here + signed(up, tl.load(sent_scales + shard)), here)
            change = meant - before
            fit = tl.abs(change) < LIMIT
            if HAS_GRAD:
                report(bad, ((fit & taken) == 0) & mask)
            meant, change = tl.where(fit, meant, before), tl.where(fit, change, 0.0)
            means = (meant != 0) & mask
            signs = pack((living & (change >= 0)) | ((living == 0) & means))
            tl.store(words_of(packets, byte) + word, signs, mask=word_mask)
            tl.store(said + own, signs, mask=word_mask)
            tl.store(busy + own, tl.cast(tl.max(means.to(tl.int32), axis=1), tl.uint8), mask=word_mask)
            _write_sums(sums, word, word_mask, room, change, living, WORDS)
            if MODE == 1 and not HAS_M:
                before = tl.where(living, before, meant)
            tl.store(known + at, before, mask=mask)


def markov_encode(
    runs: Tensor,
    grad: Tensor | None,
    m: Tensor | None,
    known: Tensor,
    said: Tensor,
    busy: Tensor,
    spoke: Tensor,
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
    device = home_of("markov_encode", "known", known)
    arguments.markov_encode(runs, grad, m, known, said, busy, spoke, active, packets, sent_scales, sums, shift, device)
    need_of_device("markov_encode", device, bad=bad, scale=scale)
    table, grid = runs_on(device, runs)
    by_tile = room_for_sums(grid, known.device, _SUMS)
    factor, on_device = number(scale)
    launch(
        _markov_encode, grid, known,
        table, grad, m, known, said, busy, spoke, active, packets, sent_scales, by_tile, by_tile.shape[-1], bad,
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
            hello = tl.load(words_of(rows, byte) + word, mask=word_mask, other=0)
            total = signed(unpack(hello), tl.load(scales))
            row = rows
            for worker in range(1, workers):
                row += row_bytes
                words = tl.load(words_of(row, byte) + word, mask=word_mask, other=0)
                total += signed(unpack(words), tl.load(scales + worker))
                hello |= words
            at = element - shift + offset
            living = unpack(tl.load(active + element // 64 + word, mask=word_mask, other=0)) & mask
            here = tl.load(mean + at, mask=mask, other=0.0)
            here = tl.where(living, here + total * share, here)
            tl.store(mean + at, here, mask=mask)
            change = here - tl.load(g + element + offset, mask=mask, other=0.0)
            signs = pack((living & (change >= 0)) | ((living == 0) & unpack(hello) & mask))
            tl.store(words_of(answer, byte) + word, signs, mask=word_mask)
            _write_sums(sums, word, word_mask, room, change, living, WORDS)


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
    device = home_of("markov_merge", "mean", mean)
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
            meant, taken = _meant(
                grad, in_param + offset, m, at, mask, beta, weight, scale, largest, HAS_GRAD, HAS_M, ON_DEVICE
            )
            change = meant - tl.load(known + at, mask=mask, other=0.0)
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
    device = home_of("markov_difference", "c", c)
    arguments.markov_difference(runs, grad, m, known, c, shift, device)
    need_of_device("markov_difference", device, bad=bad, scale=scale)
    table, grid = runs_on(device, runs)
    factor, on_device = number(scale)
    launch(
        _markov_difference, grid, c,
        table, grad, m, known, c, bad, float(beta), float(weight), factor, float(largest), shift,
        HAS_GRAD=grad is not None, HAS_M=m is not None, ON_DEVICE=on_device, WORDS=WORDS,
    )  # fmt: skip

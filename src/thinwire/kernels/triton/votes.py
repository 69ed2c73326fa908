"""The kernels of shard owners: votes about bits, which are never unpacked.

A lane is 32 elements; plane `p` of a count has bit `p` of the counts of all of them.
"""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.triton.common import device_of, draw, jit, key_of, launch, splitmix

_LANES = 512
"""Lanes of a program: four a thread, which fit into registers for 256 workers and more."""
_SIGNAL_LANES, _SIGNAL_EVERY = 128, 16
"""The signal is measured on every 16th block of 4,096 elements."""


@triton.jit
def _lanes_of(words, byte):
    """A pointer to lanes, at a byte of a buffer."""
    return (words + byte).to(tl.pointer_type(tl.uint32))


@triton.jit
def _below(key, threshold, bits, first, lane):
    """Where random numbers of 24 bits, one plane of them after another, are below a threshold of so many bits, or 0."""
    less = tl.zeros(lane.shape, dtype=tl.uint32)
    for bit in range(0, bits):
        plane = draw(splitmix(key + (23 - bit)), first, lane)
        less = tl.where(((threshold >> bit) & 1) != 0, less | ~plane, less & ~plane)
    return less


@jit(do_not_specialize=["workers", "first_lane", "lanes", "key"])
def _vote_bit(
    rows, stride, byte, workers, active, first_lane, lanes, answer, answer_byte, key,
    HAS_MAP: tl.constexpr, LEVELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * LANES
    place = start + tl.arange(0, LANES)
    mask = place < lanes
    # The groups of workers on one level of the tree differ in size by one at most: an even one is halved by a single
    # plane, an odd one takes all of them.
    odds, evens = (), ()
    if HAS_MAP:
        for level in tl.static_range(LEVELS):
            smaller = workers >> level
            odd = smaller | 1
            there_are = (odd > 1) & ((odd == smaller) | ((smaller << level) != workers))
            threshold = ((odd + 1).to(tl.int64) << 23) // odd
            of_level = key.to(tl.uint64) + 24 * level
            first, lane = first_lane + start, first_lane + place
            odds += (_below(of_level, threshold, tl.where(there_are, 24, 0), first, lane),)
            evens += (~draw(splitmix(of_level), first, lane),)
    chosen, some = tl.zeros((LANES,), dtype=tl.uint32), tl.zeros((LANES,), dtype=tl.uint32)
    for row in range(workers):
        votes = tl.load(_lanes_of(rows, tl.cast(row, tl.int64) * stride + byte) + place, mask=mask, other=0)
        some |= votes
        if HAS_MAP:
            low, size = workers * 0, workers
            for level in tl.static_range(LEVELS):
                half = (size + 1) // 2
                left = row < low + half
                less = tl.where((size & 1) != 0, odds[level], evens[level])
                votes = tl.where(size == 1, votes, votes & tl.where(left, less, ~less))
                low, size = tl.where(left, low, low + half), tl.where(left, half, size - half)
            chosen |= votes
    if HAS_MAP:
        active_lanes = tl.load(_lanes_of(active, 0) + first_lane + place, mask=mask, other=0)
        some = (chosen & active_lanes) | (some & ~active_lanes)
    tl.store(_lanes_of(answer, answer_byte) + place, some, mask=mask)


def vote_bit(
    rows: Tensor,
    byte: int,
    active: Tensor | None,
    *,
    first_word: int,
    words: int,
    answer: Tensor,
    answer_byte: int,
    key: int,
    signal: Tensor | None,
) -> None:
    """See the reference."""
    device = device_of("vote_bit", "rows", rows)
    arguments.vote_bit(rows, byte, active, first_word, words, answer, answer_byte, signal, device)
    workers = rows.shape[0]
    launch(
        _vote_bit, (triton.cdiv(2 * words, _LANES),), rows,
        rows, rows.stride(0), byte, workers, active, 2 * first_word, 2 * words, answer, answer_byte, key_of(key),
        HAS_MAP=active is not None, LEVELS=(workers - 1).bit_length(), LANES=_LANES,
    )  # fmt: skip
    _add_signal(rows, byte, active, first_word, words, signal)


@triton.jit
def _counts(rows, stride, byte, workers, place, mask, PLANES: tl.constexpr, LANES: tl.constexpr):
    """How many workers have a bit, in planes, lowest first."""
    counts = ()
    for _ in tl.static_range(PLANES):
        counts += (tl.zeros((LANES,), dtype=tl.uint32),)
    for row in range(workers):
        carry = tl.load(_lanes_of(rows, tl.cast(row, tl.int64) * stride + byte) + place, mask=mask, other=0)
        more = ()
        for plane in tl.static_range(PLANES):
            more += (counts[plane] ^ carry,)
            carry = counts[plane] & carry
        counts = more
    return counts


@jit(do_not_specialize=["workers", "first_lane", "lanes", "casting"])
def _vote_majority(
    rows, stride, byte, workers, active, first_lane, lanes, answer, answer_byte, casting,
    PLANES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    mask = place < lanes
    counts = _counts(rows, stride, byte, workers, place, mask, PLANES, LANES)
    # A count is compared with half of the workers by the highest bit in which the two differ. If none does it is a tie,
    # and of an odd number the smaller half.
    tied = tl.load(_lanes_of(rows, tl.cast(casting, tl.int64) * stride + byte) + place, mask=mask, other=0)
    more = tl.where((workers & 1) == 0, tied, 0)
    some = tl.zeros((LANES,), dtype=tl.uint32)
    for plane in tl.static_range(PLANES):
        some |= counts[plane]
        more = tl.where((((workers >> 1) >> plane) & 1) == 0, counts[plane] | more, counts[plane] & more)
    active_lanes = tl.load(_lanes_of(active, 0) + first_lane + place, mask=mask, other=0)
    tl.store(_lanes_of(answer, answer_byte) + place, (more & active_lanes) | (some & ~active_lanes), mask=mask)


def vote_majority(
    rows: Tensor,
    byte: int,
    active: Tensor,
    *,
    first_word: int,
    words: int,
    answer: Tensor,
    answer_byte: int,
    casting: int,
    signal: Tensor | None,
) -> None:
    """See the reference."""
    device = device_of("vote_majority", "rows", rows)
    arguments.vote_majority(rows, byte, active, first_word, words, answer, answer_byte, casting, signal, device)
    workers = rows.shape[0]
    launch(
        _vote_majority, (triton.cdiv(2 * words, _LANES),), rows,
        rows, rows.stride(0), byte, workers, active, 2 * first_word, 2 * words, answer, answer_byte, casting,
        PLANES=workers.bit_length(), LANES=_LANES,
    )  # fmt: skip
    _add_signal(rows, byte, active, first_word, words, signal)


@jit(do_not_specialize=["workers"])
def _vote_count(rows, stride, byte, workers, lanes, answer, answer_byte, PLANES: tl.constexpr, LANES: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    mask = place < lanes
    counts = _counts(rows, stride, byte, workers, place, mask, PLANES, LANES)
    to = _lanes_of(answer, answer_byte)
    for plane in tl.static_range(PLANES):
        tl.store(to + plane * lanes + place, counts[plane], mask=mask)


def vote_count(
    rows: Tensor,
    byte: int,
    active: Tensor,
    *,
    first_word: int,
    words: int,
    planes: int,
    answer: Tensor,
    answer_byte: int,
    signal: Tensor | None,
) -> None:
    """See the reference."""
    device = device_of("vote_count", "rows", rows)
    arguments.vote_count(rows, byte, active, first_word, words, planes, answer, answer_byte, signal, device)
    launch(
        _vote_count, (triton.cdiv(2 * words, _LANES),), rows,
        rows, rows.stride(0), byte, rows.shape[0], 2 * words, answer, answer_byte,
        PLANES=planes, LANES=_LANES,
    )  # fmt: skip
    _add_signal(rows, byte, active, first_word, words, signal)


@jit(do_not_specialize=["workers", "first_lane", "lanes"])
def _signal(rows, stride, byte, workers, active, first_lane, lanes, signal, EVERY: tl.constexpr, LANES: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * (EVERY * LANES) + tl.arange(0, LANES)
    mask = place < lanes
    bit = tl.arange(0, 32)[None, :].to(tl.uint32)
    counts = tl.zeros((LANES, 32), dtype=tl.int32)
    for row in range(workers):
        votes = tl.load(_lanes_of(rows, tl.cast(row, tl.int64) * stride + byte) + place, mask=mask, other=0)
        counts += ((votes[:, None] >> bit) & 1).to(tl.int32)
    active_lanes = tl.load(_lanes_of(active, 0) + first_lane + place, mask=mask, other=0)
    is_active = ((active_lanes[:, None] >> bit) & 1).to(tl.int32)
    majority = tl.abs(2 * counts - workers) * is_active
    tl.atomic_add(signal, tl.sum(tl.sum(majority, axis=1), axis=0).to(tl.int64), sem="relaxed")
    tl.atomic_add(signal + 1, tl.sum(tl.sum(is_active, axis=1), axis=0).to(tl.int64), sem="relaxed")


def _add_signal(
    rows: Tensor, byte: int, active: Tensor | None, first_word: int, words: int, signal: Tensor | None
) -> None:
    if signal is not None and active is not None:
        launch(
            _signal, (triton.cdiv(2 * words, _SIGNAL_EVERY * _SIGNAL_LANES),), rows,
            rows, rows.stride(0), byte, rows.shape[0], active, 2 * first_word, 2 * words, signal,
            EVERY=_SIGNAL_EVERY, LANES=_SIGNAL_LANES,
        )  # fmt: skip

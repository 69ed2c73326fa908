"""Tensors of Birder's kernels, and of votes."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels.arguments._parts import BYTES, MAX_PLANES, MAX_WORDS, parameter, shifted
from thinwire.kernels.bounds import (
    GRADIENTS,
    I64,
    STATES,
    U8,
    WORD,
    Bounds,
    Device,
    bounds_of,
    need,
    need_dense,
    need_number,
    need_one_of,
    need_rows,
)


def _birder(kernel: str, bounds: Bounds, grad: Tensor | None, m: Tensor, b: Tensor, shift: int, device: Device) -> None:
    end = bounds.whole - shift
    shifted(kernel, bounds, shift)
    if grad is not None:
        need_dense(kernel, "grad", grad, GRADIENTS, bounds.param, device)
    need_one_of(kernel, "b", b, STATES, end, device)
    need(kernel, "m", m, b.dtype, end, device)


def birder_encode(
    runs: Tensor,
    grad: Tensor | None,
    m: Tensor,
    b: Tensor,
    active: Tensor,
    packets: Tensor,
    shift: int,
    device: Device = None,
) -> Bounds:
    """Check the tensors of `birder_encode`."""
    bounds = bounds_of("birder_encode", runs)
    _birder("birder_encode", bounds, grad, m, b, shift, device)
    need("birder_encode", "active", active, I64, bounds.words, device)
    need("birder_encode", "packets", packets, U8, bounds.bits(), device)
    return bounds


def birder_direction(
    runs: Tensor, grad: Tensor | None, m: Tensor, b: Tensor, packets: Tensor, shift: int, device: Device = None
) -> Bounds:
    """Check the tensors of `birder_direction`."""
    bounds = bounds_of("birder_direction", runs)
    _birder("birder_direction", bounds, grad, m, b, shift, device)
    need("birder_direction", "packets", packets, U8, bounds.floats, device)
    return bounds


def _refreshed(kernel: str, shard_words: int, period: int, phase: int) -> int:
    """The largest number of words of a shard that an activity refresh has."""
    need_number(kernel, "shard_words", shard_words, 0, MAX_WORDS)
    need_number(kernel, "period", period, 1, MAX_WORDS)
    need_number(kernel, "phase", phase, 0, period - 1)
    return -(-shard_words // period)


def activity_refresh(
    state: Tensor,
    first_word: int,
    shard_words: int,
    shards: int,
    period: int,
    phase: int,
    packets: Tensor,
    offset: int,
    shift: int,
    device: Device = None,
) -> None:
    """Check the tensors of `activity_refresh`."""
    refreshed = _refreshed("activity_refresh", shard_words, period, phase)
    for name, value in (("first_word", first_word), ("shards", shards), ("offset", offset)):
        need_number("activity_refresh", name, value, 0, MAX_WORDS)
    end = first_word + shards * shard_words
    first = first_word + (phase - first_word) % period
    last = end - 1 - (end - 1 - phase) % period
    if first < end:
        need_number("activity_refresh", "shift", shift, 0, WORD * first)
    need_one_of("activity_refresh", "state", state, STATES, WORD * (last + 1) - shift if first < end else 0, device)
    need_rows("activity_refresh", "packets", packets, BYTES, shards, offset + 8 * refreshed, device)


def _votes(
    kernel: str,
    rows: Tensor,
    byte: int,
    active: Tensor | None,
    first_word: int,
    words: int,
    answer: Tensor,
    answer_byte: int,
    planes: int,
    signal: Tensor | None,
    device: Device,
) -> None:
    for name, value in (("byte", byte), ("first_word", first_word), ("words", words), ("answer_byte", answer_byte)):
        need_number(kernel, name, value, 0, MAX_WORDS)
    need_number(kernel, "planes", planes, 0, MAX_PLANES)
    need_rows(kernel, "rows", rows, BYTES, 1, byte + 8 * words, device)
    if active is not None:
        need(kernel, "active", active, I64, first_word + words, device)
    need(kernel, "answer", answer, U8, answer_byte + 8 * words * planes, device)
    if signal is not None:
        need(kernel, "signal", signal, I64, 2, device)


def vote_bit(
    rows: Tensor,
    byte: int,
    active: Tensor | None,
    first_word: int,
    words: int,
    answer: Tensor,
    answer_byte: int,
    signal: Tensor | None,
    device: Device = None,
) -> None:
    """Check the tensors of `vote_bit`."""
    _votes("vote_bit", rows, byte, active, first_word, words, answer, answer_byte, 1, signal, device)


def vote_majority(
    rows: Tensor,
    byte: int,
    active: Tensor,
    first_word: int,
    words: int,
    answer: Tensor,
    answer_byte: int,
    casting: int,
    signal: Tensor | None,
    device: Device = None,
) -> None:
    """Check the tensors of `vote_majority`."""
    _votes("vote_majority", rows, byte, active, first_word, words, answer, answer_byte, 1, signal, device)
    need_number("vote_majority", "casting", casting, 0, rows.shape[0] - 1)


def vote_count(
    rows: Tensor,
    byte: int,
    active: Tensor,
    first_word: int,
    words: int,
    planes: int,
    answer: Tensor,
    answer_byte: int,
    signal: Tensor | None,
    device: Device = None,
) -> None:
    """Check the tensors of `vote_count`."""
    _votes("vote_count", rows, byte, active, first_word, words, answer, answer_byte, planes, signal, device)


def activity_update(
    active: Tensor,
    first_word: int,
    shard_words: int,
    answers: Tensor,
    byte: int,
    planes: int,
    period: int,
    phase: int,
    device: Device = None,
) -> None:
    """Check the tensors of `activity_update`."""
    refreshed = _refreshed("activity_update", shard_words, period, phase)
    need_number("activity_update", "first_word", first_word, 0, MAX_WORDS)
    need_number("activity_update", "byte", byte, 0, MAX_WORDS)
    need_number("activity_update", "planes", planes, 0, MAX_PLANES)
    need_rows("activity_update", "answers", answers, BYTES, 0, byte + 8 * (shard_words * planes + refreshed), device)
    need("activity_update", "active", active, I64, first_word + answers.shape[0] * shard_words, device)


def birder_apply(
    runs: Tensor, x: Tensor, low: Tensor | None, active: Tensor, answers: Tensor, planes: int, device: Device = None
) -> Bounds:
    """Check the tensors of `birder_apply`."""
    bounds = bounds_of("birder_apply", runs)
    need_number("birder_apply", "planes", planes, 1, MAX_PLANES - 2)
    parameter("birder_apply", bounds, x, low, device)
    need("birder_apply", "active", active, I64, bounds.words, device)
    need("birder_apply", "answers", answers, U8, bounds.bits(planes), device)
    return bounds

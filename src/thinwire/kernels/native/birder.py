"""Birder's kernels and the votes about its bits, called in the library."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.native.library import lib, pointer, typed


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
    scale: float,
    amsgrad: bool,
    key: int,
    shift: int = 0,
    beta_b: float | None = None,
    level: float = 1.0,
) -> bool:
    """See `reference.birder_encode`."""
    bounds = arguments.birder_encode(runs, grad, m, b, active, packets, shift)
    beta_b = beta if beta_b is None else beta_b
    return bool(
        lib().thinwire_birder_encode(
            *bounds.table,
            *typed(grad),
            m.data_ptr(),
            *typed(b),
            shift,
            active.data_ptr(),
            packets.data_ptr(),
            beta,
            1.0 - beta,
            beta_b,
            1.0 - beta_b,
            level,
            eps,
            scale,
            amsgrad,
            key,
        )
    )


def birder_direction(
    runs: Tensor,
    grad: Tensor | None,
    m: Tensor,
    b: Tensor,
    packets: Tensor,
    *,
    beta: float,
    eps: float,
    scale: float,
    amsgrad: bool,
    shift: int = 0,
    beta_b: float | None = None,
    level: float = 1.0,
) -> bool:
    """See `reference.birder_direction`."""
    bounds = arguments.birder_direction(runs, grad, m, b, packets, shift)
    beta_b = beta if beta_b is None else beta_b
    return bool(
        lib().thinwire_birder_direction(
            *bounds.table,
            *typed(grad),
            m.data_ptr(),
            *typed(b),
            shift,
            packets.data_ptr(),
            beta,
            1.0 - beta,
            beta_b,
            1.0 - beta_b,
            level,
            eps,
            scale,
            amsgrad,
        )
    )


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
    """See `reference.activity_refresh`."""
    arguments.activity_refresh(state, first_word, shard_words, shards, period, phase, packets, offset, shift)
    lib().thinwire_activity_refresh(
        *typed(state),
        shift,
        first_word,
        shard_words,
        shards,
        period,
        phase,
        eps,
        packets.data_ptr(),
        packets.stride(0),
        offset,
    )


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
    """See `reference.vote_bit`."""
    arguments.vote_bit(rows, byte, active, first_word, words, answer, answer_byte, signal)
    lib().thinwire_vote_bit(
        rows.data_ptr() + byte,
        rows.stride(0),
        rows.shape[0],
        None if active is None else active.data_ptr() + 8 * first_word,
        first_word,
        words,
        answer.data_ptr() + answer_byte,
        key,
        pointer(signal),
    )


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
    """See `reference.vote_majority`."""
    arguments.vote_majority(rows, byte, active, first_word, words, answer, answer_byte, casting, signal)
    lib().thinwire_vote_majority(
        rows.data_ptr() + byte,
        rows.stride(0),
        rows.shape[0],
        active.data_ptr() + 8 * first_word,
        words,
        answer.data_ptr() + answer_byte,
        casting,
        pointer(signal),
    )


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
    """See `reference.vote_count`."""
    arguments.vote_count(rows, byte, active, first_word, words, planes, answer, answer_byte, signal)
    lib().thinwire_vote_count(
        rows.data_ptr() + byte,
        rows.stride(0),
        rows.shape[0],
        active.data_ptr() + 8 * first_word,
        words,
        planes,
        answer.data_ptr() + answer_byte,
        pointer(signal),
    )


def adopt(
    active: Tensor,
    *,
    first_word: int,
    shard_words: int,
    answers: Tensor,
    byte: int,
    planes: int,
    period: int,
    phase: int,
) -> None:
    """See `reference.adopt`."""
    arguments.adopt(active, first_word, shard_words, answers, byte, planes, period, phase)
    lib().thinwire_adopt(
        active.data_ptr(),
        first_word,
        shard_words,
        answers.shape[0],
        answers.data_ptr() + byte,
        answers.stride(0),
        planes,
        period,
        phase,
    )


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
) -> None:
    """See `reference.birder_apply`."""
    bounds = arguments.birder_apply(runs, x, low, active, answers, planes)
    lib().thinwire_birder_apply(
        *bounds.table,
        x.data_ptr(),
        *typed(low),
        active.data_ptr(),
        answers.data_ptr(),
        planes,
        workers,
        lr / workers if workers else lr,
        decay,
    )

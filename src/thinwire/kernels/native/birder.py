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
    alive: Tensor,
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
    bounds = arguments.birder_encode(runs, grad, m, b, alive, packets, shift)
    beta_b = beta if beta_b is None else beta_b
    return bool(
        lib().thinwire_birder_encode(
            *bounds.table,
            *typed(grad),
            m.data_ptr(),
            *typed(b),
            shift,
            alive.data_ptr(),
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


def roll_call(
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
    """See `reference.roll_call`."""
    arguments.roll_call(state, first_word, shard_words, shards, period, phase, packets, offset, shift)
    lib().thinwire_roll_call(
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
    alive: Tensor | None,
    *,
    first_word: int,
    words: int,
    answer: Tensor,
    answer_byte: int,
    key: int,
    signal: Tensor | None,
) -> None:
    """See `reference.vote_bit`."""
    arguments.vote_bit(rows, byte, alive, first_word, words, answer, answer_byte, signal)
    lib().thinwire_vote_bit(
        rows.data_ptr() + byte,
        rows.stride(0),
        rows.shape[0],
        None if alive is None else alive.data_ptr() + 8 * first_word,
        first_word,
        words,
        answer.data_ptr() + answer_byte,
        key,
        pointer(signal),
    )


def vote_majority(
    rows: Tensor,
    byte: int,
    alive: Tensor,
    *,
    first_word: int,
    words: int,
    answer: Tensor,
    answer_byte: int,
    casting: int,
    signal: Tensor | None,
) -> None:
    """See `reference.vote_majority`."""
    arguments.vote_majority(rows, byte, alive, first_word, words, answer, answer_byte, casting, signal)
    lib().thinwire_vote_majority(
        rows.data_ptr() + byte,
        rows.stride(0),
        rows.shape[0],
        alive.data_ptr() + 8 * first_word,
        words,
        answer.data_ptr() + answer_byte,
        casting,
        pointer(signal),
    )


def vote_count(
    rows: Tensor,
    byte: int,
    alive: Tensor,
    *,
    first_word: int,
    words: int,
    planes: int,
    answer: Tensor,
    answer_byte: int,
    signal: Tensor | None,
) -> None:
    """See `reference.vote_count`."""
    arguments.vote_count(rows, byte, alive, first_word, words, planes, answer, answer_byte, signal)
    lib().thinwire_vote_count(
        rows.data_ptr() + byte,
        rows.stride(0),
        rows.shape[0],
        alive.data_ptr() + 8 * first_word,
        words,
        planes,
        answer.data_ptr() + answer_byte,
        pointer(signal),
    )


def adopt(
    alive: Tensor,
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
    arguments.adopt(alive, first_word, shard_words, answers, byte, planes, period, phase)
    lib().thinwire_adopt(
        alive.data_ptr(),
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
    alive: Tensor,
    answers: Tensor,
    *,
    planes: int,
    workers: int,
    lr: float,
    decay: float,
) -> None:
    """See `reference.birder_apply`."""
    bounds = arguments.birder_apply(runs, x, low, alive, answers, planes)
    lib().thinwire_birder_apply(
        *bounds.table,
        x.data_ptr(),
        *typed(low),
        alive.data_ptr(),
        answers.data_ptr(),
        planes,
        workers,
        lr / workers if workers else lr,
        decay,
    )

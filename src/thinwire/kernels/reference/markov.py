"""The kernels of Markov compression: a worker sends the signs of the change since its last message, and one scale.

All ranks add up the messages of a worker, so the sum follows its target. The scale of a message is known only when a
whole shard has been encoded: `known` is the sum without the last message, whose signs are in `sent_words`.

A coordinate is *active* once all workers know that some worker has a gradient for it. Before that, its bit is an
activation bit: 1 for a value that is not zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.modes import LARGEST, MarkovMode
from thinwire.kernels.reference.words import (
    LIMIT,
    Run,
    each_run,
    flat,
    float32,
    padded,
    run_sum,
    signed,
    unpack,
    words_at,
)


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
    scale: float,
    shift: int,
    mode: int,
    largest: float = LARGEST,
) -> bool:
    """Write the signs of a worker's target minus what it has sent, and activation bits where coordinates are inactive.

    The target is the scaled gradient, zeros if there is none, or with `m` the momentum that takes the gradient. `known`
    and `m` have the element `e` of the flat space at `e - shift`, and `sent_words` has its word there. `nonzero` has a
    byte per word: whether its target has anything but zeros. `sent_mask` and `active` are words of the flat space.
    What the worker has sent is `known`, plus the signs in `sent_words` times `sent_scales` where `sent_mask` is set.

    ACTIVATION stores the target of inactive coordinates in `known`: nothing was sent for them. REPLAY, which can follow
    with a newer activation map, takes the target from `known`, and nothing has been sent.

    An element whose gradient is NaN, too large, or after scaling above `largest` in magnitude repeats its last value,
    and the result is True. `sums` gets for each run the sum of the magnitudes and of the squares of what is to be sent,
    and the number of active elements.
    """
    bad = False
    for i, run in enumerate(each_run(runs)):
        here, words = known[run.of_flat(shift)], _own_words(run, sent_words, shift)
        is_active = run.bits_of(active)
        if mode == MarkovMode.REPLAY:
            target, before = here.clone(), torch.zeros(run.count, device=here.device)
        else:
            target, refused = _target(run, grad, m, known, beta, weight, scale, shift, largest)
            bad |= refused
            message = signed(unpack(words)[: run.count], sent_scales[run.shard])
            before = torch.where(run.bits_of(sent_mask), here + message, here)
        change = target - before
        fit = change.abs() < LIMIT
        bad |= grad is not None and not bool(fit.all())
        target = torch.where(fit, target, before)
        change = torch.where(fit, change, 0.0)
        run.write_bits(packets, torch.where(is_active, change >= 0, target != 0))
        words.copy_(words_at(packets, run.byte, run.words))
        _own_words(run, nonzero, shift).copy_(padded(target != 0).view(-1, 64).any(1))
        _write_sums(sums[i], change, is_active)
        keeps_target = mode == MarkovMode.ACTIVATION and m is None
        here.copy_(torch.where(is_active, before, target) if keeps_target else before)
    return bad


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
    """Add the mean of the workers' messages to `mean`, and write the signs of `mean - g`.

    The runs belong to one shard, and their bytes count from the start of a packet. `rows` is `(n, packet)`, and row `i`
    stands for its bits times `scales[i]`. `mean` has the element `e` at `e - shift` and `g`, the sum of all answers, at
    `e`. Activation bits are merged by *or*. `sums` as in `markov_encode`.
    """
    share = float32(1.0) / rows.shape[0]
    for i, run in enumerate(each_run(runs)):
        total = signed(run.bits_in(rows[0]), scales[0])
        any_bit = run.bits_in(rows[0])
        for row, scale in zip(rows[1:], scales[1:], strict=True):
            total = total + signed(run.bits_in(row), scale)
            any_bit = any_bit | run.bits_in(row)
        is_active, here = run.bits_of(active), mean[run.of_flat(shift)]
        here.copy_(torch.where(is_active, here + total * share, here))
        change = here - g[run.of_flat()]
        run.write_bits(answer, torch.where(is_active, change >= 0, any_bit))
        _write_sums(sums[i], change, is_active)


def markov_difference(
    runs: Tensor,
    grad: Tensor | None,
    m: Tensor | None,
    known: Tensor,
    c: Tensor,
    *,
    beta: float,
    weight: float,
    scale: float,
    shift: int,
    largest: float = LARGEST,
) -> bool:
    """Write the target of `markov_encode` minus `known` to `c`, as floats; 0 where that is too large.

    `m`, `known` and `c` have the element `e` at `e - shift`.
    """
    bad = False
    for run in each_run(runs):
        target, refused = _target(run, grad, m, known, beta, weight, scale, shift, largest)
        change = target - known[run.of_flat(shift)]
        fit = change.abs() < LIMIT
        c[run.of_flat(shift)] = torch.where(fit, change, 0.0)
        bad |= refused or (grad is not None and not bool(fit.all()))
    return bad


def _own_words(run: Run, words: Tensor, shift: int) -> Tensor:
    """The words of a run in a tensor that has the word of the flat element `e` at `(e - shift) / 64`."""
    first = (run.element - shift) // 64
    return words[first : first + run.words]


def _target(
    run: Run,
    grad: Tensor | None,
    m: Tensor | None,
    known: Tensor,
    beta: float,
    weight: float,
    scale: float,
    shift: int,
    largest: float,
) -> tuple[Tensor, bool]:
    """The gradient, or the momentum that took it, and whether the momentum refused an element of it."""
    if grad is None:
        return torch.zeros(run.count, device=known.device) if m is None else m[run.of_flat(shift)], False
    g = flat(grad)[run.of_param].to(torch.float32) * scale
    allowed = g.abs() <= float32(largest)
    if m is None:
        return torch.where(allowed, g, torch.nan), False  # callers refuse NaN
    here = m[run.of_flat(shift)]
    momentum = here * beta + g * weight
    fit = (momentum.abs() < LIMIT) & allowed
    here.copy_(torch.where(fit, momentum, here))
    return here, not bool(fit.all())


def _write_sums(sums: Tensor, change: Tensor, is_active: Tensor) -> None:
    sums[0] = run_sum(torch.where(is_active, change.abs(), 0.0))
    sums[1] = run_sum(torch.where(is_active, change * change, 0.0))
    sums[2] = int(is_active.sum())

"""The kernels of Markov compression: what is sent is the change, in one sign and one scale, since what was said before.

Everybody adds up what a worker has said, so the sum follows what the worker means. The scale of a message is known only
when a whole shard has been encoded: a memory `known` has the sum without the last message, whose signs are in `said`.

A coordinate is *active* once all workers know that somebody has a gradient for it. Before that its bit is a hello: one
for a value that is not zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.modes import LARGEST, Say
from thinwire.kernels.reference.sign import LIMIT
from thinwire.kernels.reference.words import Run, each_run, flat, float32, padded, run_sum, signed, unpack, words_at


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
    scale: float,
    shift: int,
    mode: int,
    largest: float = LARGEST,
) -> bool:
    """Write the signs of what a worker means less what it has said, and hellos where nobody is active.

    A worker means its scaled gradient, none being zeros, or with `m` the momentum that takes it in. `known` and `m`
    have the element `e` of the flat space at `e - shift`, and so have `said` its word and `busy` a byte for the word:
    whether the worker means anything but zeros there. `spoke` and `active` are words of the flat space. What has been
    said is `known`, and where it `spoke` the sign in `said` times `sent_scales` too.

    ACTIVATION lets `known` keep a gradient for which it sends an activation bit: nothing was sent there. RECALL, which
    may follow with a better map of the living, takes it from there: it means `known`, and nothing has been said.

    An element whose gradient is no number, huge, or scaled not at most `largest` in magnitude says what it said before,
    and the result is True. `sums` gets for each run the sums of the magnitudes and of the squares of what is to be
    sent, and the number of the living.
    """
    bad = False
    for i, run in enumerate(each_run(runs)):
        here, words = known[run.of_flat(shift)], _own_words(run, said, shift)
        living = run.bits_of(active)
        if mode == Say.RECALL:
            meant, before = here.clone(), torch.zeros(run.count, device=here.device)
        else:
            meant, refused = _meant(run, grad, m, known, beta, weight, scale, shift, largest)
            bad |= refused
            message = signed(unpack(words)[: run.count], sent_scales[run.shard])
            before = torch.where(run.bits_of(spoke), here + message, here)
        change = meant - before
        fit = change.abs() < LIMIT
        bad |= grad is not None and not bool(fit.all())
        meant = torch.where(fit, meant, before)
        change = torch.where(fit, change, 0.0)
        run.write_bits(packets, torch.where(living, change >= 0, meant != 0))
        words.copy_(words_at(packets, run.byte, run.words))
        _own_words(run, busy, shift).copy_(padded(meant != 0).view(-1, 64).any(1))
        _write_sums(sums[i], change, living)
        keeps_hello = mode == Say.ACTIVATION and m is None
        here.copy_(torch.where(living, before, meant) if keeps_hello else before)
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
    """Add what the workers said to the mean of all that they have, and write the signs of what it is ahead of `g`.

    The runs are of one shard, and their bytes count from the start of a packet; `rows` is `(n, packet)`, and row `i`
    stands for its bits times `scales[i]`. `mean` has the element `e` at `e - shift` and `g`, which is what owners have
    answered so far, at `e`. Hellos are joined by *or*. `sums` as of `markov_encode`.
    """
    share = float32(1.0) / rows.shape[0]
    for i, run in enumerate(each_run(runs)):
        total = signed(run.bits_in(rows[0]), scales[0])
        hello = run.bits_in(rows[0])
        for row, scale in zip(rows[1:], scales[1:], strict=True):
            total = total + signed(run.bits_in(row), scale)
            hello = hello | run.bits_in(row)
        living, here = run.bits_of(active), mean[run.of_flat(shift)]
        here.copy_(torch.where(living, here + total * share, here))
        change = here - g[run.of_flat()]
        run.write_bits(answer, torch.where(living, change >= 0, hello))
        _write_sums(sums[i], change, living)


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
    """What a worker means, as in `markov_encode`, less `known`, as floats: `c`, which is 0 where that is huge.

    `m`, `known` and `c` have the element `e` at `e - shift`.
    """
    bad = False
    for run in each_run(runs):
        meant, refused = _meant(run, grad, m, known, beta, weight, scale, shift, largest)
        change = meant - known[run.of_flat(shift)]
        fit = change.abs() < LIMIT
        c[run.of_flat(shift)] = torch.where(fit, change, 0.0)
        bad |= refused or (grad is not None and not bool(fit.all()))
    return bad


def _own_words(run: Run, words: Tensor, shift: int) -> Tensor:
    """The words of a run among those of which the word of the flat element `e` is at `(e - shift) / 64`."""
    first = (run.element - shift) // 64
    return words[first : first + run.words]


def _meant(
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
    """The gradient, or the momentum with it, and whether the momentum refused an element of it."""
    if grad is None:
        return torch.zeros(run.count, device=known.device) if m is None else m[run.of_flat(shift)], False
    g = flat(grad)[run.of_param].to(torch.float32) * scale
    allowed = g.abs() <= float32(largest)
    if m is None:
        return torch.where(allowed, g, torch.nan), False  # which the callers refuse, as they do a gradient of NaN
    here = m[run.of_flat(shift)]
    wish = here * beta + g * weight
    fit = (wish.abs() < LIMIT) & allowed
    here.copy_(torch.where(fit, wish, here))
    return here, not bool(fit.all())


def _write_sums(sums: Tensor, change: Tensor, living: Tensor) -> None:
    sums[0] = run_sum(torch.where(living, change.abs(), 0.0))
    sums[1] = run_sum(torch.where(living, change * change, 0.0))
    sums[2] = int(living.sum())

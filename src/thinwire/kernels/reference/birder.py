"""Birder's kernels: two averages and a sampled bit, votes, the activation map, and the step."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import rng
from thinwire.kernels.reference.words import each_run, flat, float32, load_master, pack, store_master, unpack, words_at

DRAW_BITS = 24


def _is_active(state: Tensor, eps: float) -> Tensor:
    return state.to(torch.float32).abs() > float32(eps)


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
    """Update `m` and `b` by the scaled gradient (if any) and write the sampled bits; True when it was not finite.

    `m` and `b` have the element `e` of the flat space at `e - shift`. `b` decays by `beta_b`, or as `m` does, and is
    multiplied by `level` where the two are compared.
    """
    nonfinite = False
    for run in each_run(runs):
        here = slice(run.element - shift, run.element - shift + 64 * run.words)
        if grad is not None:
            nonfinite |= _absorb(flat(grad)[run.of_param], m[here], b[here], beta, beta_b, scale, amsgrad)
        r = rng.uniform(key, torch.arange(run.element, run.element + 64 * run.words, device=m.device))
        votes = m[here].to(torch.float32) > r * ((b[here].to(torch.float32) + eps) * level)
        is_active = unpack(active[run.element // 64 : run.element // 64 + run.words])
        activation_bits = _is_active(m[here] if amsgrad else b[here], eps)
        words_at(packets, run.byte, run.words).copy_(pack(torch.where(is_active, votes, activation_bits)))
    return nonfinite


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
    """As `birder_encode`, but write the direction itself, one float per element; NaN where a coordinate is inactive.

    It is `m / ((b + eps) level)`, at most 1 and at least -1.
    """
    nonfinite = False
    for run in each_run(runs):
        here = slice(run.element - shift, run.element - shift + 64 * run.words)
        if grad is not None:
            nonfinite |= _absorb(flat(grad)[run.of_param], m[here], b[here], beta, beta_b, scale, amsgrad)
        u = (m[here].to(torch.float32) / ((b[here].to(torch.float32) + eps) * level)).clamp(-1.0, 1.0)
        u = torch.where(_is_active(m[here] if amsgrad else b[here], eps), u, torch.nan)
        run.floats_in(packets).copy_(u[: run.count])
    return nonfinite


def _absorb(grad: Tensor, m: Tensor, b: Tensor, beta: float, beta_b: float | None, scale: float, amsgrad: bool) -> bool:
    """Birder's two averages, over whole words in place; elements whose gradient is not finite keep theirs."""
    beta_b = beta if beta_b is None else beta_b
    g = torch.zeros(m.numel(), device=m.device)
    g[: grad.numel()] = grad
    g *= scale
    finite = g.isfinite()
    m_old, b_old = m.to(torch.float32), b.to(torch.float32)
    m_new = m_old * beta + g * (1.0 - beta)
    b_new = b_old * beta_b + g.abs() * (1.0 - beta_b)
    if amsgrad:
        b_new = torch.maximum(b_new, b_old)
    m.copy_(torch.where(finite, m_new, m_old))
    b.copy_(torch.where(finite, b_new, b_old))
    return not bool(finite.all())


def mean(rows: Tensor, out: Tensor) -> None:
    """The mean of the rows, which are floats or bfloat16, in float32 and in their order.

    It is the sum of the rows times `1 / n`. Where that is not finite it is the sum of the rows times `1 / n` each: the
    sum of three numbers of 2e38 overflows, their mean does not.
    """
    share = float32(1.0) / rows.shape[0]
    out.copy_(rows[0])
    shares = out * share
    for row in rows[1:]:
        out += row.to(torch.float32)
        shares += row.to(torch.float32) * share
    out *= share
    out.copy_(torch.where(out.isfinite(), out, shares))


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
    """Write which elements of the words `w` with `w % period == phase` are active, at `offset` of each shard's packet.

    `state` has the element `e` of the flat space at `e - shift`.
    """
    stride = packets.stride(0)
    for shard in range(shards):
        start = first_word + shard * shard_words
        refreshed = [w for w in range(start, start + shard_words) if w % period == phase]
        to = words_at(packets, shard * stride + offset, len(refreshed))
        for i, w in enumerate(refreshed):
            to[i] = pack(_is_active(state[64 * w - shift : 64 * w - shift + 64], eps))[0]


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
    """The bit of a random worker where `active`, the *or* of all bits elsewhere (everywhere without a map).

    `rows` is `(n, packet)`; words begin at `byte` of each row and at `answer_byte` of `answer`.
    """
    n = rows.shape[0]
    bits = torch.stack([unpack(words_at(row, byte, words)) for row in rows])
    is_active = torch.zeros(64 * words, dtype=torch.bool, device=rows.device)
    if active is not None:
        is_active = unpack(active[first_word : first_word + words])
    elements = torch.arange(64 * first_word, 64 * (first_word + words), device=rows.device)
    low, high = torch.zeros_like(elements), torch.full_like(elements, n)
    level = 0
    while bool((high - low > 1).any()):
        u = torch.zeros_like(elements)
        for i in range(DRAW_BITS):
            plane = rng.draw(rng.splitmix((key + DRAW_BITS * level + i) % 2**64), elements >> 5)
            u = 2 * u + ((plane >> (elements & 31)) & 1)
        middle = low + (high - low + 1) // 2
        left = u < (middle - low) * 2**DRAW_BITS // (high - low)
        undecided = high - low > 1
        high = torch.where(undecided & left, middle, high)
        low = torch.where(undecided & ~left, middle, low)
        level += 1
    chosen = bits.gather(0, low[None])[0]
    words_at(answer, answer_byte, words).copy_(pack(torch.where(is_active, chosen, bits.any(0))))
    _add_signal(bits, is_active, signal)


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
    """The majority of the bits where `active`; row `casting` decides a tie. Elsewhere the *or* of all bits.

    Arguments are as above.
    """
    bits = torch.stack([unpack(words_at(row, byte, words)) for row in rows])
    is_active = unpack(active[first_word : first_word + words])
    lead = 2 * bits.sum(0) - rows.shape[0]
    most = torch.where(lead == 0, bits[casting], lead > 0)
    words_at(answer, answer_byte, words).copy_(pack(torch.where(is_active, most, bits.any(0))))
    _add_signal(bits, is_active, signal)


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
    """The number of votes, as `planes` planes of bits one after another, lowest first."""
    bits = torch.stack([unpack(words_at(row, byte, words)) for row in rows])
    counts = bits.sum(0)
    for plane in range(planes):
        words_at(answer, answer_byte + 8 * words * plane, words).copy_(pack((counts >> plane) & 1 == 1))
    _add_signal(bits, unpack(active[first_word : first_word + words]), signal)


def _add_signal(bits: Tensor, is_active: Tensor, signal: Tensor | None) -> None:
    # A sample is enough for a metric: every 16th block of 4096 elements.
    if signal is None:
        return
    sampled = is_active & (torch.arange(is_active.numel(), device=is_active.device) // 4096 % 16 == 0)
    signal[0] += (2 * bits.sum(0) - bits.shape[0]).abs()[sampled].sum()
    signal[1] += sampled.sum()


def activity_update(
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
    """Update `active` from a bucket's answers, one row per shard: activation bits at `byte`, then refreshed words."""
    for shard, answer in enumerate(answers):
        start = first_word + shard * shard_words
        for plane in range(planes):
            activation_bits = words_at(answer, byte + 8 * shard_words * plane, shard_words)
            active[start : start + shard_words] |= activation_bits
        refreshed = [w for w in range(start, start + shard_words) if w % period == phase]
        active[refreshed] = words_at(answer, byte + 8 * shard_words * planes, len(refreshed))


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
    """Move and decay the active coordinates of a parameter's runs by the packed answer.

    `workers` is 0 when the answer is a sign, else it is the number of votes that the planes count. `x` is fp32: the
    parameter itself, or the master of the low-precision parameter `low`. A master that no longer rounds to `low`,
    because weights were loaded, is replaced by it first.
    """
    for run in each_run(runs):
        counts = torch.zeros(run.count, dtype=torch.int64, device=x.device)
        for plane in range(planes):
            votes = unpack(words_at(answers, run.byte + plane * run.plane_bytes, run.words))[: run.count]
            counts += votes.to(torch.int64) << plane
        if workers:
            move = -((2 * counts - workers).to(torch.float32) * (lr / workers))
        else:
            move = (1 - 2 * counts).to(torch.float32) * lr
        _move(x, low, run.of_param, run.bits_of(active), move, decay)


def dense_apply(runs: Tensor, x: Tensor, low: Tensor | None, answers: Tensor, *, lr: float, decay: float) -> None:
    """Move and decay a parameter's runs by the answer's floats, where these are not NaN; `x` and `low` as above."""
    for run in each_run(runs):
        u = run.floats_in(answers)
        _move(x, low, run.of_param, ~u.isnan(), -(u * lr), decay)


def _move(x: Tensor, low: Tensor | None, here: slice, is_active: Tensor, move: Tensor, decay: float) -> None:
    old = load_master(x, low, here)
    old.copy_(torch.where(is_active, old * decay + move, old))
    store_master(x, low, here)

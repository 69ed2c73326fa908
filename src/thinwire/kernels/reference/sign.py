"""The kernels of scaled signs: what a sign and its scale leave out is the residual, which is added to the next message.

The scale of a shard is known only when all of it has been encoded, from the sums of squares. So the state `c` keeps
what was to be sent, and the next step subtracts what was sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.reference.words import (
    Run,
    each_run,
    flat,
    float32,
    guarded,
    load_master,
    run_sum,
    signed,
    store_master,
    without_sign,
)


def sign_encode(
    runs: Tensor,
    grad: Tensor | None,
    c: Tensor,
    answer_words: Tensor,
    packets: Tensor,
    *,
    sent_scales: Tensor,
    answer_scales: Tensor,
    sums: Tensor,
    beta: float,
    weight: float,
    scale: float,
    shift: int,
) -> bool:
    """Write the signs of the shared momentum plus this worker's gradient and residual.

    `c` has the element `e` of the flat space at `e - shift`. It is what was to be sent in the last step, of which its
    sign times `sent_scales` was sent; `answer_words` and `answer_scales` are the answer of that step. An element whose
    gradient would make `c` NaN or too large does not take it, and the result is True. `sums` gets each run's sum of
    squares.
    """
    nonfinite = False
    for i, run in enumerate(each_run(runs)):
        here = c[run.of_flat(shift)]
        momentum = signed(run.bits_of(answer_words), float32(beta) * answer_scales[run.shard])
        z = without_sign(here, sent_scales[run.shard]) + momentum
        if grad is not None:
            z, bad = guarded(z + (flat(grad)[run.of_param].to(torch.float32) * scale) * weight, z)
            nonfinite |= bad
        here.copy_(z)
        sums[i] = _write_signs(run, here, packets)
    return nonfinite


def sign_merge(
    runs: Tensor,
    rows: Tensor,
    y: Tensor,
    answer: Tensor,
    *,
    scales: Tensor,
    last_scales: Tensor,
    sums: Tensor,
    shift: int,
) -> None:
    """Write the signs of the mean of the workers' messages plus the residual of the last answer.

    The runs belong to one shard. Their bytes count from the start of a packet, and their last field is the number of
    a block `b` of the shard. `rows` is `(n, packet)`, `scales` is `(n, blocks)`, and row `i` stands for its bits times
    `scales[i, b]`. `y` has the element `e` at `e - shift`. It is what was to be answered in the last step, of which its
    sign times `last_scales[b]` was answered. `sums` gets each run's sum of squares.
    """
    share = float32(1.0) / rows.shape[0]
    for i, run in enumerate(each_run(runs)):
        of_block = scales[:, run.shard]
        total = signed(run.bits_in(rows[0]), of_block[0])
        for row, scale in zip(rows[1:], of_block[1:], strict=True):
            total = total + signed(run.bits_in(row), scale)
        here = y[run.of_flat(shift)]
        here.copy_(total * share + without_sign(here, last_scales[run.shard]))
        sums[i] = _write_signs(run, here, answer)


def sign_apply(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    p: Tensor,
    answer_words: Tensor,
    scales: Tensor,
    *,
    rate: float,
    decay: float,
    anchor: Tensor | None,
    m: Tensor | None,
    momentum: float,
) -> None:
    """Step by the answer, a sign and its shard's scale, with the preconditioner `p`; coordinates without one stay.

    With an `anchor` (a tensor like `x`) the step starts there: it replaces the steps made since. `m`, if any, becomes
    `momentum` times the answer.
    """
    for run in each_run(runs):
        scale, up = scales[run.shard], run.bits_of(answer_words)
        x_here = load_master(x, low, run.of_param)
        base = x_here if anchor is None else flat(anchor)[run.of_param]
        p_here = p[run.of_flat()]
        moved = base * decay + signed(~up, float32(rate) * scale) * p_here
        x_here.copy_(torch.where(p_here > 0, moved, base))
        store_master(x, low, run.of_param)
        if m is not None:
            m[run.of_flat()] = signed(up, scale * float32(momentum))


def momentum_encode(
    runs: Tensor,
    grad: Tensor | None,
    m: Tensor,
    c: Tensor,
    packets: Tensor | None,
    *,
    sent_scales: Tensor,
    sums: Tensor | None,
    beta: float,
    weight: float,
    scale: float,
    rate: float,
    shift: int,
    output: int,
) -> bool:
    """Take the gradient into the momentum `m` and the momentum, times `rate`, into what is to be sent, `c`.

    `m` has the element `e` at `e` and `c` at `e - shift`. Without a gradient nothing is added to either; an element
    whose gradient would make `m` NaN or too large keeps it, and the result is True. `output` is what is written to
    `packets`: 0 nothing, 1 the signs of `c`, whose sums of squares `sums` gets, 2 `m` itself as floats.
    """
    nonfinite = False
    for i, run in enumerate(each_run(runs)):
        m_here, c_here = m[run.of_flat()], c[run.of_flat(shift)]
        z = without_sign(c_here, sent_scales[run.shard])
        if grad is not None:
            g = flat(grad)[run.of_param].to(torch.float32) * scale
            m_new, bad = guarded(m_here * beta + g * weight, m_here)
            m_here.copy_(m_new)
            z = z + m_here * rate
            nonfinite |= bad
        c_here.copy_(z)
        if output == 1:
            assert packets is not None
            assert sums is not None
            sums[i] = _write_signs(run, c_here, packets)
        elif output == 2:
            assert packets is not None
            run.floats_in(packets).copy_(m_here)
    return nonfinite


def step_apply(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    p: Tensor,
    values: Tensor,
    *,
    rate: float,
    decay: float,
    anchor: Tensor | None,
) -> None:
    """Step by exact floats with the preconditioner `p`; `anchor`, if any, gets the parameter from before the step."""
    for run in each_run(runs):
        x_here, p_here = load_master(x, low, run.of_param), p[run.of_flat()]
        if anchor is not None:
            flat(anchor)[run.of_param] = x_here
        moved = x_here * decay - (run.floats_in(values) * rate) * p_here
        x_here.copy_(torch.where(p_here > 0, moved, x_here))
        store_master(x, low, run.of_param)


def _write_signs(run: Run, stored: Tensor, packet: Tensor) -> float:
    """Write the signs of a state as it was stored, and return the sum of its squares."""
    wide = stored.to(torch.float32)
    run.write_bits(packet, wide >= 0)
    return run_sum(wide * wide)

"""The kernels of LAMB: one measures the norms for the trust ratio of a layer, another applies the step."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.reference.adam import average, average_square
from thinwire.kernels.reference.words import each_run, flat, float32, load_master, root, run_sum, signed, store_master


def lamb_measure(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    m: Tensor,
    v: Tensor,
    gradient: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    unbias: float,
    correction: float,
    weight_decay: float,
    sums: Tensor,
) -> None:
    """Take a gradient, floats of a packet buffer, into Adam's averages; `sums` gets the squares of `x` and the update,
    and the variance.

    `x` is replaced by `low` where weights were loaded; `low` is not written.
    """
    for i, run in enumerate(each_run(runs)):
        here, g = run.of_flat(), run.floats_in(gradient)
        average(m[here], g, beta1)
        average_square(v[here], g, beta2)
        x_here = load_master(x, low, run.of_param)
        update = _update(x_here, m[here], v[here], eps, unbias, correction, weight_decay)
        sums[i, 0] = run_sum(x_here * x_here)
        sums[i, 1] = run_sum(update * update)
        sums[i, 2] = run_sum(v[here])


def lamb_apply(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    m: Tensor,
    v: Tensor,
    *,
    eps: float,
    unbias: float,
    correction: float,
    weight_decay: float,
    rate: float,
) -> None:
    """Apply the update that `lamb_measure` measured."""
    for run in each_run(runs):
        here, x_here = run.of_flat(), flat(x)[run.of_param]
        update = _update(x_here, m[here], v[here], eps, unbias, correction, weight_decay)
        x_here.copy_(torch.where(v[here] > 0, x_here - update * rate, x_here))
        store_master(x, low, run.of_param)


def _update(
    x: Tensor, m: Tensor, v: Tensor, eps: float, unbias: float, correction: float, weight_decay: float
) -> Tensor:
    update = (m * unbias) / (root(v) * correction + eps) + x * weight_decay
    return torch.where(v > 0, update, 0.0)


def onebit_lamb_measure(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    p: Tensor,
    w: Tensor,
    answer_words: Tensor,
    scales: Tensor,
    previous_words: Tensor,
    previous_scales: Tensor,
    *,
    shrink: float,
    beta1: float,
    beta2: float,
    eps: float,
    unbias: float,
    weight_decay: float,
    sums: Tensor,
) -> None:
    """Measure an update by a momentum of signs, and take the gradient that it implies into the fresh variance `w`.

    `answer_words` and `scales` are the momentum of this step, `previous_words` and `previous_scales` that of the step
    before, both times `shrink`. `p` is the preconditioner, 0 where a coordinate has none. `sums` gets the squares of
    the direction and of the update, and the largest factor by which the fresh variance would lengthen a step. `x` is
    replaced by `low` where weights were loaded.
    """
    inverse = 1.0 / (1.0 - beta1)
    for i, run in enumerate(each_run(runs)):
        here = run.of_flat()
        x_here, p_here = load_master(x, low, run.of_param), p[here]
        moves = p_here > 0
        momentum = signed(run.bits_of(answer_words), scales[run.shard] * float32(shrink))
        kept = signed(run.bits_of(previous_words), (previous_scales[run.shard] * float32(shrink)) * float32(beta1))
        fresh = w[here].clone()
        average_square(fresh, (momentum - kept) * inverse, beta2)
        w[here] = torch.where(moves, fresh, w[here])
        direction = torch.where(moves, (momentum * unbias) * p_here, 0.0)
        update = torch.where(moves, direction + x_here * weight_decay, 0.0)
        denominator = p_here * (root(w[here]) + eps)
        factor = torch.where(moves, torch.ones_like(denominator) / denominator, 0.0)
        sums[i, 0] = run_sum(direction * direction)
        sums[i, 1] = run_sum(update * update)
        sums[i, 2] = factor.max() if run.count else 0.0


def square_sum(values: Tensor) -> float:
    """The sum of the squares of a dense fp32 tensor, as of one run."""
    return run_sum(flat(values) * flat(values))

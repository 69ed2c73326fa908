"""AMSGrad's steps: dense ones, by a gradient from a state, signs or floats, and sparse ones at selected coordinates."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.bounds import refuse_indices
from thinwire.kernels.modes import LARGEST, Source
from thinwire.kernels.reference.adam import average, average_square
from thinwire.kernels.reference.words import LIMIT, each_run, flat, float32, load_master, root, signed, store_master


def amsgrad_apply(
    runs: Tensor,
    x: Tensor | None,
    low: Tensor | None,
    g: Tensor | None,
    m: Tensor | None,
    v: Tensor | None,
    peak: Tensor | None,
    packets: Tensor | None,
    scales: Tensor | None,
    active: Tensor | None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    rate: float,
    correction: float,
    decay: float,
    source: int,
) -> None:
    """AMSGrad's step for the coordinates that have had a variance; `peak` is the largest variance of each.

    The gradient is `g` for STATE. For SIGNS, `g` first moves, where `active`, by the packets' bits times the scale of
    the shard; without `x` that is all. For FLOATS it is the packets' floats. All states have the element `e` at `e`.
    """
    for run in each_run(runs):
        here = run.of_flat()
        if source == Source.FLOATS:
            assert packets is not None
            gradient = run.floats_in(packets)
        else:
            assert g is not None
            gradient = g[here]
        if source == Source.SIGNS:
            assert packets is not None
            assert scales is not None
            assert active is not None
            moved_gradient = gradient + signed(run.bits_in(packets), scales[run.shard])
            gradient.copy_(torch.where(run.bits_of(active), moved_gradient, gradient))
        if x is None:
            continue
        assert m is not None
        assert v is not None
        assert peak is not None
        average(m[here], gradient, beta1)
        average_square(v[here], gradient, beta2)
        _raise(peak[here], v[here])
        old = load_master(x, low, run.of_param)
        moved = old * decay - (m[here] * rate) / (root(peak[here]) * correction + eps)
        old.copy_(torch.where(peak[here] > 0, moved, old))
        store_master(x, low, run.of_param)


def sparse_amsgrad(
    x: Tensor,
    low: Tensor | None,
    v: Tensor,
    peak: Tensor,
    indices: Tensor,
    momenta: Tensor,
    gradients: Tensor,
    *,
    first: int,
    beta2: float,
    eps: float,
    rate: float,
    decay: float,
) -> None:
    """AMSGrad's step of one parameter at selected coordinates, by their momenta and gradients.

    `indices` are flat elements, ascending, and the parameter begins with `first`; `v` and `peak` begin with it too.
    A coordinate whose momentum and gradient are both zero counts as not selected. Coordinates that were selected in an
    earlier step, whose `v` is therefore no longer its initial value `eps`, decay in every step.

    Raises:
        ValueError: when an index is outside of the parameter; nothing has been done then.
    """
    if bool(((indices < first) | (indices >= first + x.numel())).any()):
        refuse_indices(x, indices, first)
    whole = slice(0, x.numel())
    x_here = load_master(x, low, whole)
    begun = v[whole] != float32(eps)
    x_here.copy_(torch.where(begun, x_here * decay, x_here))
    chosen = (momenta != 0) | (gradients != 0)
    at, p, g = indices[chosen].to(torch.int64) - first, momenta[chosen], gradients[chosen]
    variance, largest = v[at], peak[at]
    average_square(variance, g, beta2)
    _raise(largest, variance)
    v[at], peak[at] = variance, largest
    x_here[at] -= (p * rate) / root(largest)
    store_master(x, low, whole)


def momentum_sum(
    runs: Tensor,
    grad: Tensor | None,
    m: Tensor,
    e: Tensor,
    g: Tensor,
    *,
    beta: float,
    weight: float,
    scale: float,
    ratio: float,
    shift: int,
    largest: float = LARGEST,
) -> bool:
    """Add the scaled gradient, zeros if there is none, to the momentum `m`; `e` becomes `m` plus `ratio` times `e`.

    `g` becomes the scaled gradient. All three have the element `e` of the flat space at `e - shift`. An element whose
    momentum or sum would be NaN or too large, or whose scaled gradient is above `largest` in magnitude, keeps both, its
    gradient counts as 0, and the result is True.
    """
    bad = False
    for run in each_run(runs):
        here = run.of_flat(shift)
        gradient = torch.zeros(run.count, device=m.device)
        if grad is not None:
            gradient = flat(grad)[run.of_param].to(torch.float32) * scale
        momentum = m[here] * beta + gradient * weight
        total = momentum + e[here] * ratio
        fit = (momentum.abs() < LIMIT) & (total.abs() < LIMIT) & (gradient.abs() <= float32(largest))
        m[here] = torch.where(fit, momentum, m[here])
        e[here] = torch.where(fit, total, e[here])
        g[here] = torch.where(fit, gradient, 0.0)
        bad |= not bool(fit.all())
    return bad


def _raise(peak: Tensor, v: Tensor) -> None:
    peak.copy_(torch.where(v > peak, v, peak))

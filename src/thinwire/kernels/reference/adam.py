"""The kernels of Adam's dense steps: encode a gradient as floats, and step by floats or by scaled signs."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.modes import LARGEST
from thinwire.kernels.reference.words import each_run, flat, float32, load_master, root, run_sum, signed, store_master


def dense_encode(runs: Tensor, grad: Tensor | None, packets: Tensor, *, scale: float, largest: float = LARGEST) -> bool:
    """Write the scaled gradient as floats, zeros if there is none.

    True when the magnitude of one of them is above `largest`, infinite or NaN. Optimizers that square gradients pass
    the largest one whose squares have a finite sum.
    """
    nonfinite = False
    for run in each_run(runs):
        to = run.floats_in(packets)
        if grad is None:
            to.zero_()
        else:
            to.copy_(flat(grad)[run.of_param].to(torch.float32) * scale)
        nonfinite |= not bool((to.abs() <= float32(largest)).all())
    return nonfinite


def adam_apply(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    m: Tensor,
    v: Tensor,
    gradient: Tensor,
    scales: Tensor | None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    rate: float,
    correction: float,
    decay: float,
    update_variance: bool,
) -> float:
    """Adam's step for the coordinates that have a variance, and the sum of the variances.

    `m` and `v` have the element `e` of the flat space at `e`. Without `scales`, `gradient` is a packet buffer with
    floats; else it is the words of the flat space, and an element's gradient is its shard's scale with the sign of its
    bit. `x` is fp32: the parameter itself, or the master of the low-precision parameter `low`.
    """
    total = 0.0
    for run in each_run(runs):
        here = run.of_flat()
        g = run.floats_in(gradient) if scales is None else signed(run.bits_of(gradient), scales[run.shard])
        average(m[here], g, beta1)
        if update_variance:
            average_square(v[here], g, beta2)
        old = load_master(x, low, run.of_param)
        moved = old * decay - (m[here] * rate) / (root(v[here]) * correction + eps)
        old.copy_(torch.where(v[here] > 0, moved, old))
        store_master(x, low, run.of_param)
        total += run_sum(v[here])
    return total


def average(m: Tensor, g: Tensor, beta: float) -> None:
    """Take `g` into the moving average `m`."""
    m.copy_(m * beta + g * (1.0 - beta))


def average_square(v: Tensor, g: Tensor, beta: float) -> None:
    """Take the square of `g` into the moving average `v`."""
    v.copy_(v * beta + (g * (1.0 - beta)) * g)


def precondition(v: Tensor, *, correction: float, floor: float, eps: float) -> None:
    """Replace a frozen variance by the factor of steps, `1 / (max(sqrt(v) correction, floor) + eps)`; 0 stays 0."""
    roots = torch.clamp(root(v) * correction, min=float(float32(floor)))
    v.copy_(torch.where(v > 0, 1.0 / (roots + eps), 0.0))

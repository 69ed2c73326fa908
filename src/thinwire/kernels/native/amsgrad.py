"""The kernels of AMSGrad's steps, dense and sparse, called in the library."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.bounds import refuse_indices
from thinwire.kernels.modes import LARGEST
from thinwire.kernels.native.library import lib, pointer, typed


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
    """See `reference.amsgrad_apply`."""
    bounds = arguments.amsgrad_apply(runs, x, low, g, m, v, peak, packets, scales, active, source)
    lib().thinwire_amsgrad_apply(
        *bounds.table,
        pointer(x),
        *typed(low),
        pointer(g),
        pointer(m),
        pointer(v),
        pointer(peak),
        pointer(packets),
        pointer(scales),
        pointer(active),
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        eps,
        rate,
        correction,
        decay,
        source,
    )


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
    """See `reference.momentum_sum`."""
    bounds = arguments.momentum_sum(runs, grad, m, e, g, shift)
    return bool(
        lib().thinwire_momentum_sum(
            *bounds.table,
            *typed(grad),
            m.data_ptr(),
            e.data_ptr(),
            g.data_ptr(),
            shift,
            beta,
            weight,
            scale,
            ratio,
            largest,
        )
    )


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
    """See `reference.sparse_amsgrad`."""
    arguments.sparse_amsgrad(x, low, v, peak, indices, momenta, gradients)
    done = lib().thinwire_sparse_amsgrad(
        x.data_ptr(),
        x.numel(),
        *typed(low),
        v.data_ptr(),
        peak.data_ptr(),
        indices.data_ptr(),
        momenta.data_ptr(),
        gradients.data_ptr(),
        indices.numel(),
        first,
        beta2,
        1.0 - beta2,
        eps,
        rate,
        decay,
    )
    if not done:
        refuse_indices(indices, first, x.numel())

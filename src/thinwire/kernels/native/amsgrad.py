"""The kernels of AMSGrad's steps, dense and sparse, called in the library."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels.native.library import lib, pointer, table, typed


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
    alive: Tensor | None,
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
    lib().thinwire_amsgrad_apply(
        *table(runs),
        pointer(x),
        *typed(low),
        pointer(g),
        pointer(m),
        pointer(v),
        pointer(peak),
        pointer(packets),
        pointer(scales),
        pointer(alive),
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
) -> bool:
    """See `reference.momentum_sum`."""
    return bool(
        lib().thinwire_momentum_sum(
            *table(runs),
            *typed(grad),
            m.data_ptr(),
            e.data_ptr(),
            g.data_ptr(),
            shift,
            beta,
            weight,
            scale,
            ratio,
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
    lib().thinwire_sparse_amsgrad(
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

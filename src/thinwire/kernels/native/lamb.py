"""The kernels of LAMB and 1-bit LAMB, called in the library."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.native.library import lib, typed


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
    """See `reference.lamb_measure`."""
    bounds = arguments.lamb_measure(runs, x, low, m, v, gradient, sums)
    lib().thinwire_lamb_measure(
        *bounds.table,
        x.data_ptr(),
        *typed(low),
        m.data_ptr(),
        v.data_ptr(),
        gradient.data_ptr(),
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        eps,
        unbias,
        correction,
        weight_decay,
        sums.data_ptr(),
    )


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
    """See `reference.lamb_apply`."""
    bounds = arguments.lamb_apply(runs, x, low, m, v)
    lib().thinwire_lamb_apply(
        *bounds.table,
        x.data_ptr(),
        *typed(low),
        m.data_ptr(),
        v.data_ptr(),
        eps,
        unbias,
        correction,
        weight_decay,
        rate,
    )


def onebit_lamb_measure(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    p: Tensor,
    w: Tensor,
    heard: Tensor,
    scales: Tensor,
    before: Tensor,
    scales_before: Tensor,
    *,
    shrink: float,
    beta1: float,
    beta2: float,
    eps: float,
    unbias: float,
    weight_decay: float,
    sums: Tensor,
) -> None:
    """See `reference.onebit_lamb_measure`."""
    bounds = arguments.onebit_lamb_measure(runs, x, low, p, w, heard, scales, before, scales_before, sums)
    lib().thinwire_onebit_lamb_measure(
        *bounds.table,
        x.data_ptr(),
        *typed(low),
        p.data_ptr(),
        w.data_ptr(),
        heard.data_ptr(),
        scales.data_ptr(),
        before.data_ptr(),
        scales_before.data_ptr(),
        shrink,
        beta1,
        1.0 / (1.0 - beta1),
        beta2,
        1.0 - beta2,
        eps,
        unbias,
        weight_decay,
        sums.data_ptr(),
    )

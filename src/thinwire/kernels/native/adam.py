"""The kernel of Adam's step, called in the library."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.native.library import lib, pointer, typed


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
    """See `reference.adam_apply`."""
    bounds = arguments.adam_apply(runs, x, low, m, v, gradient, scales)
    return lib().thinwire_adam_apply(
        *bounds.table,
        x.data_ptr(),
        *typed(low),
        m.data_ptr(),
        v.data_ptr(),
        gradient.data_ptr(),
        pointer(scales),
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        eps,
        rate,
        correction,
        decay,
        update_variance,
    )


def precondition(v: Tensor, *, correction: float, floor: float, eps: float) -> None:
    """See `reference.precondition`."""
    arguments.precondition(v)
    lib().thinwire_precondition(v.data_ptr(), v.numel(), correction, floor, eps)

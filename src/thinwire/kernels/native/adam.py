"""The kernel of Adam's step, called in the library."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels.native.library import lib, pointer, table, typed


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
    return lib().thinwire_adam_apply(
        *table(runs),
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
    lib().thinwire_precondition(v.data_ptr(), v.numel(), correction, floor, eps)

"""The kernels of scaled signs with error memory, called in the library."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.native.library import lib, pointer, typed


def sign_encode(
    runs: Tensor,
    grad: Tensor | None,
    c: Tensor,
    heard: Tensor,
    packets: Tensor,
    *,
    sent_scales: Tensor,
    heard_scales: Tensor,
    sums: Tensor,
    beta: float,
    weight: float,
    scale: float,
    shift: int,
) -> bool:
    """See `reference.sign_encode`."""
    bounds = arguments.sign_encode(runs, grad, c, heard, packets, sent_scales, heard_scales, sums, shift)
    return bool(
        lib().thinwire_sign_encode(
            *bounds.table,
            *typed(grad),
            *typed(c),
            shift,
            heard.data_ptr(),
            packets.data_ptr(),
            sent_scales.data_ptr(),
            heard_scales.data_ptr(),
            sums.data_ptr(),
            beta,
            weight,
            scale,
        )
    )


def sign_merge(
    runs: Tensor,
    rows: Tensor,
    y: Tensor,
    answer: Tensor,
    *,
    scales: Tensor,
    last_scale: float | Tensor,
    sums: Tensor,
    shift: int,
) -> None:
    """See `reference.sign_merge`."""
    bounds = arguments.sign_merge(runs, rows, y, answer, scales, sums, shift)
    lib().thinwire_sign_merge(
        *bounds.table,
        rows.data_ptr(),
        rows.stride(0),
        rows.shape[0],
        *typed(y),
        shift,
        answer.data_ptr(),
        scales.data_ptr(),
        float(last_scale),
        sums.data_ptr(),
    )


def sign_apply(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    p: Tensor,
    heard: Tensor,
    scales: Tensor,
    *,
    rate: float,
    decay: float,
    anchor: Tensor | None,
    m: Tensor | None,
    momentum: float,
) -> None:
    """See `reference.sign_apply`."""
    bounds = arguments.sign_apply(runs, x, low, p, heard, scales, anchor, m)
    lib().thinwire_sign_apply(
        *bounds.table,
        x.data_ptr(),
        *typed(low),
        p.data_ptr(),
        heard.data_ptr(),
        scales.data_ptr(),
        rate,
        decay,
        pointer(anchor),
        pointer(m),
        momentum,
    )


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
    """See `reference.momentum_encode`."""
    bounds = arguments.momentum_encode(runs, grad, m, c, packets, sent_scales, sums, shift, output)
    return bool(
        lib().thinwire_momentum_encode(
            *bounds.table,
            *typed(grad),
            m.data_ptr(),
            *typed(c),
            shift,
            pointer(packets),
            sent_scales.data_ptr(),
            pointer(sums),
            beta,
            weight,
            scale,
            rate,
            output,
        )
    )

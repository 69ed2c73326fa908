"""Tensors of AMSGrad's kernels."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels.arguments._parts import FLOAT32, given, parameter, same_order, shifted
from thinwire.kernels.bounds import F32, GRADIENTS, I32, I64, LOW, U8, Bounds, Device, bounds_of, need, need_dense
from thinwire.kernels.modes import Source


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
    source: int,
    device: Device = None,
) -> Bounds:
    """Check the tensors of `amsgrad_apply`."""
    kernel = "amsgrad_apply"
    bounds = bounds_of(kernel, runs)
    if source == Source.SIGNS:
        need(kernel, "packets", given(kernel, "packets", packets), U8, bounds.bits(), device)
        need(kernel, "scales", given(kernel, "scales", scales), F32, bounds.shards, device)
        need(kernel, "active", given(kernel, "active", active), I64, bounds.words, device)
    elif source == Source.FLOATS:
        need(kernel, "packets", given(kernel, "packets", packets), U8, bounds.floats, device)
    if source != Source.FLOATS:
        need(kernel, "g", given(kernel, "g", g), F32, bounds.elements, device)
    if x is not None:
        parameter(kernel, bounds, x, low, device)
        for name, tensor in (("m", m), ("v", v), ("peak", peak)):
            need(kernel, name, given(kernel, name, tensor), F32, bounds.elements, device)
    return bounds


def momentum_sum(
    runs: Tensor, grad: Tensor | None, m: Tensor, e: Tensor, g: Tensor, shift: int, device: Device = None
) -> Bounds:
    """Check the tensors of `momentum_sum`."""
    bounds = bounds_of("momentum_sum", runs)
    shifted("momentum_sum", bounds, shift)
    if grad is not None:
        need_dense("momentum_sum", "grad", grad, GRADIENTS, bounds.param, device)
    for name, tensor in (("m", m), ("e", e), ("g", g)):
        need("momentum_sum", name, tensor, F32, bounds.elements - shift, device)
    return bounds


def sparse_amsgrad(
    x: Tensor,
    low: Tensor | None,
    v: Tensor,
    peak: Tensor,
    indices: Tensor,
    momenta: Tensor,
    gradients: Tensor,
    device: Device = None,
) -> None:
    """Check the tensors of `sparse_amsgrad`, but for the indices, which the kernel checks one by one."""
    kernel, count, chosen = "sparse_amsgrad", x.numel(), indices.numel()
    need_dense(kernel, "x", x, FLOAT32, count, device)
    if low is not None:
        need_dense(kernel, "low", low, LOW, count, device)
        same_order(kernel, "low", low, x)
    need(kernel, "v", v, F32, count, device)
    need(kernel, "peak", peak, F32, count, device)
    need(kernel, "indices", indices, I32, chosen, device)
    need(kernel, "momenta", momenta, F32, chosen, device)
    need(kernel, "gradients", gradients, F32, chosen, device)

"""Tensors of kernels whose packets have floats: dense ones, Adam and LAMB."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels.arguments._parts import FLOAT32, anchored, parameter
from thinwire.kernels.bounds import (
    F32,
    F64,
    GRADIENTS,
    I64,
    STATES,
    U8,
    Bounds,
    Device,
    bounds_of,
    need,
    need_dense,
    need_rows,
)


def dense_encode(runs: Tensor, grad: Tensor | None, packets: Tensor, device: Device = None) -> Bounds:
    """Check the tensors of `dense_encode`."""
    bounds = bounds_of("dense_encode", runs)
    if grad is not None:
        need_dense("dense_encode", "grad", grad, GRADIENTS, bounds.param, device)
    need("dense_encode", "packets", packets, U8, bounds.floats, device)
    return bounds


def dense_apply(runs: Tensor, x: Tensor, low: Tensor | None, answers: Tensor, device: Device = None) -> Bounds:
    """Check the tensors of `dense_apply`."""
    bounds = bounds_of("dense_apply", runs)
    parameter("dense_apply", bounds, x, low, device)
    need("dense_apply", "answers", answers, U8, bounds.floats, device)
    return bounds


def mean(rows: Tensor, out: Tensor, device: Device = None) -> None:
    """Check the tensors of `mean`."""
    need_rows("mean", "rows", rows, STATES, 1, 0, device)
    need("mean", "out", out, F32, rows.shape[1], device)


def step_apply(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    p: Tensor,
    values: Tensor,
    anchor: Tensor | None,
    device: Device = None,
) -> Bounds:
    """Check the tensors of `step_apply`."""
    bounds = bounds_of("step_apply", runs)
    parameter("step_apply", bounds, x, low, device)
    anchored("step_apply", bounds, anchor, x, device)
    need("step_apply", "p", p, F32, bounds.elements, device)
    need("step_apply", "values", values, U8, bounds.floats, device)
    return bounds


def square_sum(values: Tensor, device: Device = None) -> None:
    """Check the tensor of `square_sum`."""
    need_dense("square_sum", "values", values, FLOAT32, values.numel(), device)


def precondition(v: Tensor, device: Device = None) -> None:
    """Check the tensor of `precondition`."""
    need("precondition", "v", v, F32, 0, device)


def adam_apply(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    m: Tensor,
    v: Tensor,
    gradient: Tensor,
    scales: Tensor | None,
    device: Device = None,
) -> Bounds:
    """Check the tensors of `adam_apply`."""
    bounds = bounds_of("adam_apply", runs)
    parameter("adam_apply", bounds, x, low, device)
    need("adam_apply", "m", m, F32, bounds.elements, device)
    need("adam_apply", "v", v, F32, bounds.elements, device)
    if scales is None:
        need("adam_apply", "gradient", gradient, U8, bounds.floats, device)
    else:
        need("adam_apply", "gradient", gradient, I64, bounds.words, device)
        need("adam_apply", "scales", scales, F32, bounds.shards, device)
    return bounds


def lamb_measure(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    m: Tensor,
    v: Tensor,
    gradient: Tensor,
    sums: Tensor,
    device: Device = None,
) -> Bounds:
    """Check the tensors of `lamb_measure`."""
    bounds = bounds_of("lamb_measure", runs)
    parameter("lamb_measure", bounds, x, low, device)
    need("lamb_measure", "m", m, F32, bounds.elements, device)
    need("lamb_measure", "v", v, F32, bounds.elements, device)
    need("lamb_measure", "gradient", gradient, U8, bounds.floats, device)
    need("lamb_measure", "sums", sums, F64, 3 * bounds.rows, device)
    return bounds


def lamb_apply(runs: Tensor, x: Tensor, low: Tensor | None, m: Tensor, v: Tensor, device: Device = None) -> Bounds:
    """Check the tensors of `lamb_apply`."""
    bounds = bounds_of("lamb_apply", runs)
    parameter("lamb_apply", bounds, x, low, device)
    need("lamb_apply", "m", m, F32, bounds.elements, device)
    need("lamb_apply", "v", v, F32, bounds.elements, device)
    return bounds


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
    sums: Tensor,
    device: Device = None,
) -> Bounds:
    """Check the tensors of `onebit_lamb_measure`."""
    bounds = bounds_of("onebit_lamb_measure", runs)
    parameter("onebit_lamb_measure", bounds, x, low, device)
    for name, tensor in (("p", p), ("w", w)):
        need("onebit_lamb_measure", name, tensor, F32, bounds.elements, device)
    for name, tensor in (("answer_words", answer_words), ("previous_words", previous_words)):
        need("onebit_lamb_measure", name, tensor, I64, bounds.words, device)
    for name, tensor in (("scales", scales), ("previous_scales", previous_scales)):
        need("onebit_lamb_measure", name, tensor, F32, bounds.shards, device)
    need("onebit_lamb_measure", "sums", sums, F64, 3 * bounds.rows, device)
    return bounds

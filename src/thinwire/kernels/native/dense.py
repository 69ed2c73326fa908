"""The kernels of floats that travel as they are, called in the library."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.modes import LARGEST
from thinwire.kernels.native.library import dtype_code, lib, pointer, typed


def dense_encode(runs: Tensor, grad: Tensor | None, packets: Tensor, *, scale: float, largest: float = LARGEST) -> bool:
    """See `reference.dense_encode`."""
    bounds = arguments.dense_encode(runs, grad, packets)
    return bool(lib().thinwire_dense_encode(*bounds.table, *typed(grad), packets.data_ptr(), scale, largest))


def mean(rows: Tensor, out: Tensor) -> None:
    """See `reference.mean`."""
    arguments.mean(rows, out)
    lib().thinwire_mean(
        rows.data_ptr(),
        rows.stride(0) * rows.element_size(),
        rows.shape[0],
        dtype_code(rows),
        rows.shape[1],
        out.data_ptr(),
    )


def dense_apply(runs: Tensor, x: Tensor, low: Tensor | None, answers: Tensor, *, lr: float, decay: float) -> None:
    """See `reference.dense_apply`."""
    bounds = arguments.dense_apply(runs, x, low, answers)
    lib().thinwire_dense_apply(*bounds.table, x.data_ptr(), *typed(low), answers.data_ptr(), lr, decay)


def step_apply(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    p: Tensor,
    values: Tensor,
    *,
    rate: float,
    decay: float,
    anchor: Tensor | None,
) -> None:
    """See `reference.step_apply`."""
    bounds = arguments.step_apply(runs, x, low, p, values, anchor)
    lib().thinwire_step_apply(
        *bounds.table, x.data_ptr(), *typed(low), p.data_ptr(), values.data_ptr(), rate, decay, pointer(anchor)
    )


def square_sum(values: Tensor) -> float:
    """See `reference.square_sum`."""
    arguments.square_sum(values)
    return lib().thinwire_square_sum(values.data_ptr(), values.numel())

"""The kernels of floats that travel as they are, called in the library."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels.native.library import dtype_code, lib, pointer, table, typed


def dense_encode(runs: Tensor, grad: Tensor | None, packets: Tensor, *, scale: float) -> bool:
    """See `reference.dense_encode`."""
    return bool(lib().thinwire_dense_encode(*table(runs), *typed(grad), packets.data_ptr(), scale))


def mean(rows: Tensor, out: Tensor) -> None:
    """See `reference.mean`."""
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
    lib().thinwire_dense_apply(*table(runs), x.data_ptr(), *typed(low), answers.data_ptr(), lr, decay)


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
    lib().thinwire_step_apply(
        *table(runs), x.data_ptr(), *typed(low), p.data_ptr(), values.data_ptr(), rate, decay, pointer(anchor)
    )


def square_sum(values: Tensor) -> float:
    """See `reference.square_sum`."""
    return lib().thinwire_square_sum(values.data_ptr(), values.numel())

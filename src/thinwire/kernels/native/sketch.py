"""The kernels of count sketches, called in the library."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.native.library import lib


def sketch_add(values: Tensor, table: Tensor, coefficients: Tensor, *, first: int) -> None:
    """See `reference.sketch_add`."""
    arguments.sketch("sketch_add", values, table, coefficients, first)
    lib().thinwire_sketch_add(
        values.data_ptr(), first, values.numel(), table.data_ptr(), *table.shape, coefficients.data_ptr()
    )


def sketch_estimate(table: Tensor, values: Tensor, coefficients: Tensor, *, first: int, weight: float) -> None:
    """See `reference.sketch_estimate`."""
    arguments.sketch("sketch_estimate", values, table, coefficients, first)
    lib().thinwire_sketch_estimate(
        table.data_ptr(), *table.shape, coefficients.data_ptr(), first, values.numel(), weight, values.data_ptr()
    )


def sketch_top_k(
    table: Tensor, peak: Tensor, ranges: Tensor, indices: Tensor, scratch: Tensor, *, coefficients: Tensor
) -> None:
    """See `reference.sketch_top_k`."""
    arguments.sketch_top_k(table, peak, ranges, indices, scratch, coefficients)
    lib().thinwire_sketch_top_k(
        table.data_ptr(),
        *table.shape,
        coefficients.data_ptr(),
        peak.data_ptr(),
        ranges.data_ptr(),
        ranges.shape[0],
        indices.numel(),
        indices.data_ptr(),
        scratch.data_ptr(),
    )

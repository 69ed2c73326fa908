"""Tensors of kernels that select the largest elements, and of count sketches."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels.bounds import F32, I32, I64, Device, need, need_number, ranges_of

MAX_SKETCH_ROWS = 15
MAX_SKETCH_COLUMNS = 2**30
MAX_SKETCH_ELEMENTS = 2**31 - 1
_TALLY_BYTES = 2**19
"""Two bytes for each of the elements that `sketch_top_k` looks at together: see `kTallied` in csrc/sketch.inc."""


def top_k_scratch(indices: Tensor) -> int:
    """The length of the scratch memory of `top_k`."""
    return 2 * indices.numel()


def sketch_top_k_scratch(indices: Tensor, table: Tensor) -> int:
    """The length of the scratch memory of `sketch_top_k`: besides that of `top_k`, a byte per cell of the table."""
    if indices.numel() == 0:
        return 0
    return top_k_scratch(indices) + -(-(_TALLY_BYTES + table.numel()) // I64.itemsize)


def _selection(kernel: str, indices: Tensor, scratch: Tensor, scratch_size: int, among: int, device: Device) -> None:
    chosen = indices.numel()
    need(kernel, "indices", indices, I32, chosen, device)
    need(kernel, "scratch", scratch, I64, scratch_size, device)
    if chosen > among:
        raise ValueError(f"{kernel}: indices has {chosen} elements: expected at most {among}, which it selects from")


def top_k(values: Tensor, indices: Tensor, scratch: Tensor, device: Device = None) -> None:
    """Check the tensors of `top_k`."""
    need("top_k", "values", values, F32, 0, device)
    _selection("top_k", indices, scratch, top_k_scratch(indices), values.numel(), device)


def sparse_add(values: Tensor, indices: Tensor, amounts: Tensor, device: Device = None) -> None:
    """Check the tensors of `sparse_add`, but for the indices, which the kernel checks one by one."""
    need("sparse_add", "values", values, F32, 0, device)
    need("sparse_add", "indices", indices, I32, 0, device)
    need("sparse_add", "amounts", amounts, F32, indices.numel(), device)


def _sketch(kernel: str, table: Tensor, coefficients: Tensor, device: Device) -> None:
    need(kernel, "table", table, F32, 0, device)
    if table.dim() != 2 or not 1 <= table.shape[0] <= MAX_SKETCH_ROWS or not 1 <= table.shape[1] <= MAX_SKETCH_COLUMNS:
        shape = tuple(table.shape)
        raise ValueError(f"{kernel}: table has the shape {shape}: expected 1 to {MAX_SKETCH_ROWS} rows of 1 to 2**30")
    need(kernel, "coefficients", coefficients, I64, 4 * table.shape[0], device)


def sketch_add(values: Tensor, table: Tensor, coefficients: Tensor, first: int, device: Device = None) -> None:
    """Check the tensors of `sketch_add`."""
    _sketched("sketch_add", values, table, coefficients, first, device)


def sketch_estimate(values: Tensor, table: Tensor, coefficients: Tensor, first: int, device: Device = None) -> None:
    """Check the tensors of `sketch_estimate`."""
    _sketched("sketch_estimate", values, table, coefficients, first, device)


def _sketched(kernel: str, values: Tensor, table: Tensor, coefficients: Tensor, first: int, device: Device) -> None:
    _sketch(kernel, table, coefficients, device)
    need(kernel, "values", values, F32, 0, device)
    need_number(kernel, "first", first, 0, MAX_SKETCH_ELEMENTS - values.numel())


def sketch_top_k(
    table: Tensor,
    peak: Tensor,
    ranges: Tensor,
    indices: Tensor,
    scratch: Tensor,
    coefficients: Tensor,
    device: Device = None,
) -> None:
    """Check the tensors of `sketch_top_k`."""
    within = ranges_of("sketch_top_k", ranges)
    _sketch("sketch_top_k", table, coefficients, device)
    need("sketch_top_k", "peak", peak, F32, within.end, device)
    _selection("sketch_top_k", indices, scratch, sketch_top_k_scratch(indices, table), within.elements, device)
    need_number("sketch_top_k", "the end of ranges", within.end, 0, MAX_SKETCH_ELEMENTS)

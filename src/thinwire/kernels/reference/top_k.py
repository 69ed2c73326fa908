"""The largest of many values, and sums at few places of many."""

from __future__ import annotations

from torch import Tensor


def top_k(values: Tensor, indices: Tensor, scratch: Tensor) -> None:
    """The indices of the `len(indices)` largest magnitudes, ascending; of equal ones the first count as larger.

    `scratch` is room for others: int64, twice as long as `indices`.
    """
    assert scratch.numel() >= 2 * indices.numel()
    indices.copy_(largest(values.abs(), indices.numel()))


def largest(values: Tensor, k: int) -> Tensor:
    """The indices of the `k` largest values, ascending; of equal ones the first."""
    return values.sort(descending=True, stable=True).indices[:k].sort().values


def sparse_add(values: Tensor, indices: Tensor, amounts: Tensor, *, weight: float) -> bool:
    """Add `weight` times each amount to the value at its index, one after the other.

    When an index is none of the values' nothing is added, and the result is False.
    """
    if bool(((indices < 0) | (indices >= values.numel())).any()):
        return False
    add_in_order(values, indices, amounts * weight)
    return True


def add_in_order(cells: Tensor, at: Tensor, amounts: Tensor) -> None:
    """`cells[at[i]] += amounts[i]` for i = 0, 1, ...: torch does it in that order for one dimension on the CPU."""
    cells.index_add_(0, at, amounts)

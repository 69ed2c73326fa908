"""Count sketches: a table of sums, a few rows of columns, that has each element once in every row.

A polynomial of degree 3 modulo the prime 2^31 - 1 gives, for each row, the column of an element and its sign there.
With random coefficients, any four elements are independent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.reference.top_k import add_in_order, largest
from thinwire.kernels.reference.words import root, signed

PRIME = 2**31 - 1


def hashes(coefficients: Tensor, elements: Tensor) -> Tensor:
    """The polynomial of each row, whose constant comes first, at each element: int64 `(rows, elements)`."""
    h = torch.zeros((coefficients.shape[0], elements.numel()), dtype=torch.int64, device=elements.device)
    for power in (3, 2, 1, 0):
        h = (h * elements + coefficients[:, power, None]) % PRIME
    return h


def sketch_add(values: Tensor, table: Tensor, coefficients: Tensor, *, first: int) -> None:
    """Add the values of the elements from `first` on to their cells, in the order of the elements."""
    positive, columns = _places(table, coefficients, torch.arange(first, first + values.numel(), device=values.device))
    for row, plus, column in zip(table, positive, columns, strict=True):
        add_in_order(row, column, signed(plus, values))


def sketch_estimate(table: Tensor, values: Tensor, coefficients: Tensor, *, first: int, weight: float) -> None:
    """Add `weight` times the table's estimate of each element from `first` on to its value."""
    values += (
        _estimates(table, coefficients, torch.arange(first, first + values.numel(), device=values.device)) * weight
    )


def sketch_top_k(
    table: Tensor, peak: Tensor, ranges: Tensor, indices: Tensor, scratch: Tensor, *, coefficients: Tensor
) -> None:
    """The elements with the largest estimates in units of the root of `peak`, ascending; of equal ones the first.

    `ranges` has rows (first element, count) of those that are asked about, ascending and disjoint; `peak` has the
    element `e` at `e`. The native kernel uses `scratch`, see `sketch_top_k_scratch` in `kernels.arguments.selections`.
    """
    assert scratch.numel() >= 2 * indices.numel()
    none = torch.empty(0, dtype=torch.int64, device=peak.device)
    within = [torch.arange(start, start + count, device=peak.device) for start, count in ranges.tolist()]
    elements = torch.cat([none, *within])
    keys = _estimates(table, coefficients, elements).abs() / root(peak[elements])
    indices.copy_(elements[largest(keys, indices.numel())])


def _places(table: Tensor, coefficients: Tensor, elements: Tensor) -> tuple[Tensor, Tensor]:
    """Whether elements count as they are, or else negated, and in which column; each `(rows, elements)`."""
    h = hashes(coefficients, elements)
    return h % 2 == 0, ((h >> 1) * table.shape[1]) >> 30


def _estimates(table: Tensor, coefficients: Tensor, elements: Tensor) -> Tensor:
    """The medians over the rows; for an even number of rows, the mean of the middle two. A zero is positive."""
    positive, columns = _places(table, coefficients, elements)
    sent_words = table.gather(1, columns)
    ordered = signed(positive, sent_words).sort(0).values
    rows = table.shape[0]
    if rows % 2:
        return ordered[rows // 2] + 0.0  # sorting decides which of several zeros is in the middle
    return (ordered[rows // 2 - 1] + ordered[rows // 2]) * 0.5 + 0.0

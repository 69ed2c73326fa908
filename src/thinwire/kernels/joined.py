"""Runs of many tensors in one table: one call of a native kernel instead of one per tensor.

A kernel adds the field `in_param` of a run to the address of a parameter or gradient. Here that field leads from the
lowest address of all tensors to the elements of the run in its own tensor. The kernel does the same work in the same
order as in one call per tensor, so no bit changes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

_IN_PARAM = 1
_ELEMENT_BYTES = torch.float32.itemsize
_UNALIGNED = _ELEMENT_BYTES - 1

_kinds = attrgetter("dtype", "layout", "is_cpu")
_CLASSES = {Tensor, Parameter}
_PLAIN = {(torch.float32, torch.strided, True)}


def plain_addresses(tensors: Sequence[Tensor | None], numels: Sequence[int]) -> list[int] | None:
    """The addresses of tensors if all are there, and as kernels read them: ordinary tensors of float32 on the CPU, of
    these lengths, contiguous, without a negative bit; otherwise None.

    It asks about all tensors at once, one question after another: loops in C, which are several times as fast.
    """
    if not set(map(type, tensors)) <= _CLASSES:
        return None
    given = cast("Sequence[Tensor]", tensors)
    if (
        set(map(_kinds, given)) != _PLAIN
        or not all(map(Tensor.is_contiguous, given))
        or any(map(Tensor.is_neg, given))
        or list(map(Tensor.numel, given)) != numels
    ):
        return None
    addresses = list(map(Tensor.data_ptr, given))
    return addresses if all(addresses) else None  # zeros of autograd have no memory


class Gathered:
    """The memory of many float32 tensors, in place of a tensor in calls of native kernels.

    It answers what `thinwire.kernels.bounds` asks of a tensor. Whoever gives the addresses has checked the tensors.
    """

    dtype = torch.float32
    is_cpu = True

    def __init__(self) -> None:
        self.address = 0

    def as_tensor(self) -> Tensor:
        """Itself, for signatures."""
        return cast("Tensor", self)

    def data_ptr(self) -> int:
        """The lowest address."""
        return self.address

    def numel(self) -> int:
        """More than any run needs."""
        return 1 << 62

    def is_contiguous(self) -> bool:
        """As each of the tensors."""
        return True

    def is_neg(self) -> bool:
        """As each of the tensors."""
        return False

    def untyped_storage(self) -> Gathered:
        """What has the memory."""
        return self

    def nbytes(self) -> int:
        """As `numel`."""
        return self.numel()


class JoinedRuns:
    """The tables of some groups of tensors, which `point_to` adapts to where the tensors are.

    Args:
        groups: for each table, the runs of each of its tensors.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        rows = [row for group in groups for runs in group for row in runs.tolist()]
        lengths = [len(runs) for group in groups for runs in group]
        memory = array("q", (field for row in rows for field in row))
        self.memory = Gathered()
        """What kernels get in place of the tensors."""
        self.tables: list[Tensor] = []
        """The table of each group."""
        # Tensors of their own over the same memory: kernels know a table by the number of writes to it, and need not
        # check it again after `point_to`, which changes nothing that they check.
        first = 0
        for group in groups:
            count = sum(map(len, group))
            table = torch.frombuffer(memory, dtype=torch.int64, count=6 * count, offset=48 * first) if count else None
            self.tables.append(torch.empty(0, 6, dtype=torch.int64) if table is None else table.view(-1, 6))
            first += count
        if rows:
            self._column = torch.frombuffer(memory, dtype=torch.int64).view(-1, 6)[:, _IN_PARAM]
            self._starts = self._column.clone()
            self._tensor_of = torch.repeat_interleave(torch.tensor(lengths))
            self._offsets = torch.empty_like(self._starts)

    def point_to(self, addresses: Sequence[int]) -> bool:
        """Let the tables lead to tensors at these addresses, all groups one after another.

        Returns:
            Whether that is possible. It is not if the tensors are not aligned alike.
        """
        if not addresses:
            return False
        self.memory.address = lowest = min(addresses)
        all_of_them = torch.frombuffer(array("q", addresses), dtype=torch.int64)
        if lowest & _UNALIGNED or int((all_of_them & _UNALIGNED).any()):
            return False
        torch.index_select(all_of_them, 0, self._tensor_of, out=self._offsets)
        self._offsets.sub_(lowest).div_(_ELEMENT_BYTES, rounding_mode="floor").add_(self._starts)
        self._column.copy_(self._offsets)
        return True

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
_HOST = torch.device("cpu")
_ELEMENT_BYTES = torch.float32.itemsize
_UNALIGNED = _ELEMENT_BYTES - 1
_FEW = 64
"""Runs of a group that is written by a loop."""

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
        memory = array("q", (field for row in rows for field in row))
        self.memory = Gathered()
        """What kernels get in place of the tensors."""
        self.tables: list[Tensor] = []
        """The table of each group."""
        self._rows = memory
        self._everything: tuple[Tensor, ...] = ()
        """The field `in_param` of all runs, its value in the table of the tensor, and the number of the tensor."""
        self._of_group: list[tuple[Tensor, ...]] = []
        """The same for each group."""
        self._few: list[list[tuple[int, int, int]]] = []
        """The same for each group of few runs, for one run after another: where the field is in `_rows`."""
        self._pointed: dict[int | None, tuple[Sequence[int], int]] = {}
        """The addresses to which the tables of a group lead now, or those of all groups, and the lowest of them."""
        if not rows:
            return
        # Tensors of their own over the same memory: kernels know a table by the number of writes to it, and need not
        # check it again after `point_to`, which changes nothing that they check.
        column = torch.frombuffer(memory, dtype=torch.int64).view(-1, 6)[:, _IN_PARAM]
        lengths = [len(runs) for group in groups for runs in group]
        self._everything = column, column.clone(), torch.repeat_interleave(torch.tensor(lengths, device=_HOST))
        first_row = first_tensor = 0
        for group in groups:
            count = sum(map(len, group))
            table = torch.frombuffer(memory, dtype=torch.int64, count=6 * count, offset=48 * first_row)
            self.tables.append(table.view(-1, 6))
            here, starts, tensor_of = (each[first_row : first_row + count] for each in self._everything)
            tensor_of = tensor_of - first_tensor
            self._of_group.append((here, starts, tensor_of))
            fields = range(6 * first_row + _IN_PARAM, 6 * (first_row + count), 6)
            few = zip(fields, starts.tolist(), tensor_of.tolist(), strict=True) if count <= _FEW else ()
            self._few.append(list(few))
            first_row, first_tensor = first_row + count, first_tensor + len(group)

    def point_to(self, addresses: Sequence[int], group: int | None = None) -> bool:
        """Let the tables lead to tensors at these addresses, all groups one after another; or that of one group only.

        Returns:
            Whether that is possible. It is not if the tensors are not aligned.
        """
        if not addresses:
            return False
        before, lowest = self._pointed.get(group, (None, 0))
        if addresses != before:
            lowest = min(addresses)
            if lowest & _UNALIGNED or not self._write(addresses, lowest, group):
                return False
        self.memory.address = lowest
        return True

    def _write(self, addresses: Sequence[int], lowest: int, group: int | None) -> bool:
        if group is not None and self._few[group]:
            # A loop takes less time than one operation of torch whose code is no longer in the cache.
            distances = [address - lowest for address in addresses]
            if any(distance & _UNALIGNED for distance in distances):
                return False
            rows = self._rows
            for field, start, number in self._few[group]:
                rows[field] = start + distances[number] // _ELEMENT_BYTES
        else:
            given = torch.frombuffer(array("q", addresses), dtype=torch.int64)
            if bool((given & _UNALIGNED).any()):
                return False
            column, starts, tensor_of = self._everything if group is None else self._of_group[group]
            torch.add(starts, (given - lowest).floor_divide_(_ELEMENT_BYTES)[tensor_of], out=column)
        if group is None:
            self._pointed.clear()
        else:
            self._pointed.pop(None, None)
        self._pointed[group] = list(addresses), lowest
        return True

"""Checks of memory before a kernel accesses it.

Native and Triton kernels take raw pointers. A tensor of another dtype or device, or one shorter than its runs require,
would corrupt the heap. One whose values torch negates on reading (its negative bit) would be read wrongly. `arguments`
defines what each kernel requires.
"""

from __future__ import annotations

from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from thinwire._torch_compat import write_count

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
I32, I64, U8, BOOL = torch.int32, torch.int64, torch.uint8, torch.bool
DTypes = tuple[torch.dtype, ...]
GRADIENTS: DTypes = (F32, BF16, F16)
STATES: DTypes = (F32, BF16)
"""Dtypes of states and of rows of floats."""
LOW: DTypes = (BF16, F16)
"""Dtypes of a parameter that has a master."""

Device = torch.device | None
"""The device of all tensors. None is the CPU, which is faster to check."""

WORD = 64
_RUN_FIELDS = ("element", "in_param", "count", "byte", "plane_bytes", "shard")
_RANGE_FIELDS = ("first", "count")
_CACHE = "_thinwire_bounds"
_NOWHERE = 1 << 62


def words_of(count: int) -> int:
    """The number of words for the bits of `count` elements."""
    return -(-count // WORD)


def quantized_word_bytes(bits: int, block: int) -> int:
    """The bytes of a word of quantised elements: a bfloat16 scale per block, and a code of `bits` per element."""
    return 2 * (WORD // block) + 8 * bits


# Tables --------------------------------------------------------------------------------------------------------------


class Bounds:
    """The lengths that tensors need for the runs of a table.

    A run without elements needs none, but kernels read the scale of its shard.
    """

    __slots__ = (
        "_bits",
        "_packed",
        "_rows",
        "elements",
        "first",
        "floats",
        "longest",
        "param",
        "pointer",
        "rows",
        "shards",
        "table",
        "version",
        "whole",
        "words",
        "work",
    )

    def __init__(self, kernel: str, runs: Tensor) -> None:
        self._rows = _rows_of(kernel, "runs", runs, _RUN_FIELDS)
        self._bits: dict[int, int] = {}
        self._packed: dict[int, int] = {}
        self.pointer, self.version = runs.data_ptr(), -1
        self.rows = len(self._rows)
        self.table = (self.pointer, self.rows)
        """The table itself, as native kernels take it."""
        self.first, self.elements, self.whole = _NOWHERE, 0, 0
        """The flat space: the first element, and where the elements end, as they are and rounded up to whole words."""
        self.param, self.floats, self.shards = 0, 0, 0
        """Where the elements end in their parameter, where floats end in a packet, and how many shards there are."""
        self.work = sum(count for _, _, count, *_ in self._rows)
        """The elements of all runs."""
        self.longest = max((count for _, _, count, *_ in self._rows), default=0)
        for element, in_param, count, byte, _, shard in self._rows:
            if element % WORD:
                raise ValueError(f"{kernel}: runs has a row with element={element}: expected a multiple of {WORD}")
            self.shards = max(self.shards, shard + 1)
            if count:
                self.first = min(self.first, element)
                self.elements = max(self.elements, element + count)
                self.whole = max(self.whole, element + WORD * words_of(count))
                self.param = max(self.param, in_param + count)
                self.floats = max(self.floats, byte + 4 * count)
        self.words = self.whole // WORD

    def bits(self, planes: int = 1) -> int:
        """Where `planes` planes of bits end in a packet."""
        if planes not in self._bits:
            ends = [byte + (planes - 1) * apart + 8 * words_of(n) for _, _, n, byte, apart, _ in self._rows if n]
            self._bits[planes] = max(ends, default=0)
        return self._bits[planes]

    def packed(self, word_bytes: int) -> int:
        """Where words of `word_bytes` bytes end in a packet."""
        if word_bytes not in self._packed:
            ends = [byte + word_bytes * words_of(n) for _, _, n, byte, _, _ in self._rows if n]
            self._packed[word_bytes] = max(ends, default=0)
        return self._packed[word_bytes]


class Ranges:
    """Where the ranges of a selection end, and how many elements they have."""

    __slots__ = ("elements", "end", "pointer", "version")

    def __init__(self, kernel: str, ranges: Tensor) -> None:
        rows = _rows_of(kernel, "ranges", ranges, _RANGE_FIELDS)
        self.pointer, self.version = ranges.data_ptr(), -1
        self.end = max((first + count for first, count in rows if count), default=0)
        self.elements = sum(count for _, count in rows)


def bounds_of(kernel: str, runs: Tensor) -> Bounds:
    """The bounds of a table of runs, computed when the table is first seen or has been written to."""
    known = runs.__dict__.get(_CACHE)
    if known is not None and known.version == write_count(runs) and known.pointer == runs.data_ptr():
        return known
    return _remember(runs, Bounds(kernel, runs))


def ranges_of(kernel: str, ranges: Tensor) -> Ranges:
    """The same for a table of ranges."""
    known = ranges.__dict__.get(_CACHE)
    if known is not None and known.version == write_count(ranges) and known.pointer == ranges.data_ptr():
        return known
    return _remember(ranges, Ranges(kernel, ranges))


_Known = TypeVar("_Known", Bounds, Ranges)


def _remember(table: Tensor, known: _Known) -> _Known:
    if not table.is_inference():  # those do not count how often they were written to
        known.version = write_count(table)
        setattr(table, _CACHE, known)
    return known


def _rows_of(kernel: str, name: str, table: Tensor, fields: tuple[str, ...]) -> list[list[int]]:
    """The rows of a table on the host, none of whose fields is negative."""
    need(kernel, name, table, I64, 0, None)
    if table.dim() != 2 or table.shape[1] != len(fields):
        raise ValueError(
            f"{kernel}: {name} has the shape {tuple(table.shape)}: expected rows of {len(fields)}, "
            f"which are {', '.join(fields)}"
        )
    rows = table.tolist()
    for row in rows:
        for field, value in zip(fields, row, strict=True):
            if value < 0:
                raise ValueError(f"{kernel}: {name} has a row with {field}={value}: expected no negative number")
    return rows


# Tensors -------------------------------------------------------------------------------------------------------------


def need(kernel: str, name: str, tensor: Tensor, dtype: torch.dtype, length: int, device: Device) -> None:
    """Check a contiguous tensor of at least `length` elements.

    Raises:
        TypeError: when its dtype is not `dtype`.
        ValueError: when anything else is wrong with it.
    """
    if (
        tensor.dtype is not dtype
        or tensor.numel() < length
        or tensor.is_neg()
        or not tensor.is_contiguous()
        or not (tensor.is_cpu if device is None else tensor.device == device)
    ):
        refuse(kernel, name, tensor, (dtype,), length, device)


def need_one_of(kernel: str, name: str, tensor: Tensor, dtypes: DTypes, length: int, device: Device) -> None:
    """The same for a tensor of one of several dtypes."""
    if (
        tensor.dtype not in dtypes
        or tensor.numel() < length
        or tensor.is_neg()
        or not tensor.is_contiguous()
        or not (tensor.is_cpu if device is None else tensor.device == device)
    ):
        refuse(kernel, name, tensor, dtypes, length, device)


def need_dense(kernel: str, name: str, tensor: Tensor, dtypes: DTypes, length: int, device: Device) -> None:
    """The same for a parameter or a gradient, which is read in the order of its memory.

    The memory can have been freed: FSDP frees that of sharded parameters.
    """
    if (
        tensor.dtype not in dtypes
        or tensor.numel() < length
        or tensor.is_neg()
        or not (tensor.is_contiguous() or is_dense(tensor))
        or not (tensor.is_cpu if device is None else tensor.device == device)
        or (length > 0 and not tensor.untyped_storage().nbytes())
    ):
        refuse(kernel, name, tensor, dtypes, length, device, dense=True)


def need_rows(kernel: str, name: str, tensor: Tensor, dtypes: DTypes, rows: int, length: int, device: Device) -> None:
    """The same for at least `rows` rows of at least `length` elements each, which may be apart from each other."""
    if (
        tensor.dtype not in dtypes
        or tensor.dim() != 2
        or tensor.shape[0] < rows
        or (tensor.shape[1] < length and tensor.shape[0] > 0)
        or (tensor.stride(1) != 1 and tensor.shape[1] > 1)
        or tensor.is_neg()
        or not (tensor.is_cpu if device is None else tensor.device == device)
    ):
        refuse(kernel, name, tensor, dtypes, length, device, rows=rows)


def need_number(kernel: str, name: str, value: int, low: int, high: int) -> None:
    """Check an integer in `[low, high]` from which kernels compute addresses."""
    if not low <= value <= high:
        raise ValueError(f"{kernel}: {name}={value}: expected an integer from {low} to {high}")


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a block of memory without gaps or overlaps, in any order of the dimensions."""
    filled = 1
    for stride, size in sorted(
        (tensor.stride(i), tensor.shape[i]) for i in range(tensor.dim()) if tensor.shape[i] != 1
    ):
        if stride != filled:
            return tensor.numel() == 0
        filled *= size
    return True


def refuse(
    kernel: str,
    name: str,
    tensor: Tensor,
    dtypes: DTypes,
    length: int,
    device: Device,
    *,
    dense: bool = False,
    rows: int | None = None,
) -> NoReturn:
    """Raise the error of `need` and its variants: it names the argument, what it is, and what is expected."""
    is_ = f"{kernel}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)} and stride {tensor.stride()}"
    is_ += f" on {tensor.device}"
    if tensor.is_neg():
        is_ += ", with torch's negative bit"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        is_ += ", its memory freed"
    of = f"at least {length} elements" if rows is None else f"at least {rows} rows of at least {length} elements"
    order = "in a dense piece of memory" if dense else "contiguous" if rows is None else "each row contiguous"
    wanted = (
        f"expected {' or '.join(map(str, dtypes))}, {of}, {order}, on {device or 'the CPU'}, without a negative bit"
    )
    raise (ValueError if tensor.dtype in dtypes else TypeError)(f"{is_}: {wanted}")


def refuse_indices(x: Tensor, indices: Tensor, first: int) -> NoReturn:
    """Raise the error of `sparse_amsgrad` for a selected element outside of the parameter."""
    low, high, count = int(indices.min()), int(indices.max()), x.numel()
    raise ValueError(
        f"sparse_amsgrad: indices are elements from {low} to {high}: expected those of the parameter, from {first} "
        f"to {first + count - 1}"
    )

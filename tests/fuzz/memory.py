"""Memory that ends where a page begins that nobody may touch: who reads or writes a byte too far ends the process.

The sanitizers know no tensors that lie in mapped memory, and other builds have no sanitizers.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_UNTOUCHED = 0xA5


class Fences:
    """Tensors with a page before and a page behind them that cannot be accessed."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._before: list[Tensor] = []

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor:
        """As `thinwire.transport.memory.untouched_zeros`; the last byte is the last one before the fence."""
        size = elements * dtype.itemsize
        if not size:
            return torch.empty(0, dtype=dtype)
        pages = -(-size // _PAGE)
        region = mmap.mmap(-1, (pages + 2) * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(region, dtype=torch.uint8)
        for page in (0, pages + 1):
            if self._libc.mprotect(whole.data_ptr() + page * _PAGE, _PAGE, 0):
                raise OSError(ctypes.get_errno(), f"mprotect: {os.strerror(ctypes.get_errno())}")
        before = whole[_PAGE : (pages + 1) * _PAGE - size]
        before.fill_(_UNTOUCHED)
        self._before.append(before)
        return whole[(pages + 1) * _PAGE - size : (pages + 1) * _PAGE].view(dtype)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor, within fences."""
        return self.zeros(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor)

    def check(self) -> None:
        """See that nothing was written between the fences and the tensors.

        Raises:
            AssertionError: when something was.
        """
        for before in self._before:
            assert bool((before == _UNTOUCHED).all()), "a kernel has written in front of its memory"

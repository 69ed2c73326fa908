"""The memory of tensors as bytes, and zeros that take no memory until they are written."""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from contextlib import suppress

import torch
from torch import Tensor

HOST = torch.device("cpu")
"""For tensors of the host, whatever torch's default device is."""
_HUGE_PAGES_FROM = 1 << 22
"""Bytes of a tensor that gets pages of 2 MB instead of 4 kB. Kernels go through it from one end to the other, and spend
a tenth to a third of their time on looking up small pages."""
_MAPPINGS: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""By address, the memory of `untouched_zeros` that can be given back. A tensor keeps its mapping alive."""


def untouched_zeros(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like torch.zeros, but memory is used only where it is written: for tensors that only one stage of a run needs.

    The system provides zero pages on the first write and takes all of them back with the tensor. A GPU has no such
    pages, so zeros are written at once there.
    """
    if not elements or device.type != "cpu":
        return torch.zeros(elements, dtype=dtype, device=device)
    private = {} if not hasattr(mmap, "MAP_PRIVATE") else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    mapping = mmap.mmap(-1, elements * dtype.itemsize, **private)
    if len(mapping) >= _HUGE_PAGES_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel that was built without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(mapping, dtype=dtype)
    if sys.platform == "linux":  # other systems do not promise zeros after MADV_DONTNEED
        _MAPPINGS[tensor.data_ptr()] = mapping
    return tensor


def zero_and_give_back(tensor: Tensor) -> None:
    """Set a tensor of `untouched_zeros` to zero, and give its memory back to the system until it is written again.

    On a GPU, and on systems other than Linux, the memory stays in use.
    """
    mapping = _MAPPINGS.get(tensor.data_ptr()) if tensor.is_cpu else None
    if mapping is None or len(mapping) != tensor.nbytes:
        tensor.zero_()
    else:
        mapping.madvise(mmap.MADV_DONTNEED)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without NumPy, which is optional for torch. The caller keeps the tensor alive.

    Raises:
        ValueError: the tensor is not on the CPU, not contiguous, or has a negative or conjugate bit.
    """
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
        raise ValueError(
            f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()} on {tensor.device}, "
            f"negative bit {tensor.is_neg()}, conjugate bit {tensor.is_conj()}: expected one on the CPU, contiguous, "
            "without either bit"
        )
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")

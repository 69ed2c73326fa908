"""The memory of tensors as bytes, and zeros that take no memory until they are written."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

HOST = torch.device("cpu")
"""For tensors of the host, whatever torch's default device is."""


def untouched_zeros(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like torch.zeros, but memory is used only where it is written: for tensors that only one stage of a run needs.

    The system provides zero pages on the first write and takes all of them back with the tensor. A GPU has no such
    pages, so zeros are written at once there.
    """
    if not elements or device.type != "cpu":
        return torch.zeros(elements, dtype=dtype, device=device)
    private = {} if not hasattr(mmap, "MAP_PRIVATE") else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, **private), dtype=dtype)


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

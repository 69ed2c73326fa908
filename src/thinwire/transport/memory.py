"""Memory of tensors, as bytes, and such that is not there before something is written to it."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

HOST = torch.device("cpu")
"""Where everything is that is the host's own, whatever torch's default device is."""


def untouched_zeros(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.zeros, which writes all of them: for what one stage of an optimizer needs and another does not.

    The system gives out pages of zeros as they are first written, and takes all of them back with the tensor. A GPU has
    no such pages: there they are zeros from the start.
    """
    if not elements or device.type != "cpu":
        return torch.zeros(elements, dtype=dtype, device=device)
    private = {} if not hasattr(mmap, "MAP_PRIVATE") else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, **private), dtype=dtype)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without NumPy, which torch can do without. The caller keeps the tensor alive.

    Raises:
        ValueError: when the tensor is not on the CPU, not contiguous, or negated by torch when it is read.
    """
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
        raise ValueError(
            f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()} on {tensor.device}, "
            f"negative bit {tensor.is_neg()}, conjugate bit {tensor.is_conj()}: expected one on the CPU, contiguous, "
            "without either bit"
        )
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")

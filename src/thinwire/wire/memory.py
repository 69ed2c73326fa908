"""Zeros that take no memory before something is written to them."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor


def untouched_zeros(elements: int, dtype: torch.dtype) -> Tensor:
    """As torch.zeros, which writes all of them: for what one stage of an optimizer needs and another does not.

    The system gives out pages of zeros as they are first written, and takes all of them back with the tensor.
    """
    if not elements:
        return torch.zeros(0, dtype=dtype)
    private = {} if not hasattr(mmap, "MAP_PRIVATE") else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, **private), dtype=dtype)

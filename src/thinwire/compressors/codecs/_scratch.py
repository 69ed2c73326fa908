"""Temporary memory for the kernels that select the largest elements."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.transport.memory import HOST


class Scratch:
    """Memory that grows when a call needs more, and is kept for the next call. Not thread-safe."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.int64, device=HOST)

    def reserve(self, size: int) -> Tensor:
        """At least `size` int64 numbers."""
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.int64, device=HOST)
        return self._memory

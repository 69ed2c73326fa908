"""Room that selections of the largest elements need while they run."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.transport.memory import HOST


class Scratch:
    """Grows when more is asked for, and is kept; for one thread at a time."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.int64, device=HOST)

    def for_(self, indices: Tensor) -> Tensor:
        """Enough to select so many elements."""
        if self._room.numel() < 2 * indices.numel():
            self._room = torch.empty(2 * indices.numel(), dtype=torch.int64, device=HOST)
        return self._room

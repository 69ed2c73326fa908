"""How many threads a call of a native kernel uses: as many as torch.

`torch.set_num_threads` sets both. Its default is the number of cores, or OMP_NUM_THREADS, which torchrun sets to 1. A
call with few elements uses one thread. So does a call on a lane of the exchange while the training loop computes: more
threads would take cores from the backward pass. While the training loop waits for the exchange, lanes use its threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

LEAST = 131072
"""Elements from which on a call uses several threads. To wake them takes as long as some ten thousand elements."""


class Lent:
    """How many threads the training loop lends to its lanes."""

    def __init__(self) -> None:
        self.number = 1

    @contextmanager
    def while_waiting(self) -> Iterator[None]:
        """Lend those of the calling thread, which waits meanwhile."""
        self.number = torch.get_num_threads()
        try:
            yield
        finally:
            self.number = 1


class _OfThread(threading.local):
    lent: Lent | None = None


_of_thread = _OfThread()


def borrow(lent: Lent | None) -> None:
    """Let kernels on the calling thread use as many threads as are lent; None for as many as torch."""
    _of_thread.lent = lent


def number() -> int:
    """How many threads a call on the calling thread may use."""
    lent = _of_thread.lent
    return torch.get_num_threads() if lent is None else lent.number

"""The order of work on a device, of which the host only tells, and for which it does not wait."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A moment in the work of a side stream."""

    def passed(self) -> bool:
        """Whether the device has come to it."""
        ...


class Streams(Protocol):
    """Two queues of work on a device: the current stream, which computes gradients, and a side stream for exchanges."""

    def aside(self) -> AbstractContextManager[None]:
        """Work inside is the side stream's, and begins when what the current one has been given so far is done."""
        ...

    def join(self) -> None:
        """Let the current stream go on only after what the side stream has been given so far."""

    def mark(self) -> Mark:
        """The moment at which the side stream has done what it has been given so far."""
        ...

    def share(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor, once nobody holds it any more, from whoever comes next, until the side stream
        has done what it was given by then."""


class CudaStreams:
    """Those of a GPU.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        # Of high priority: what others wait for goes before what only this rank does.
        self._side = torch.cuda.Stream(device, priority=-1)
        self._device = device
        self._forked, self._joined = torch.cuda.Event(), torch.cuda.Event()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See `Streams`."""
        self._forked.record(torch.cuda.current_stream(self._device))
        self._side.wait_event(self._forked)
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """See `Streams`."""
        self._joined.record(self._side)
        torch.cuda.current_stream(self._device).wait_event(self._joined)

    def mark(self) -> Mark:
        """See `Streams`."""
        event = torch.cuda.Event()
        event.record(self._side)
        return _Passing(event)

    def share(self, tensor: Tensor) -> None:
        """See `Streams`."""
        tensor.record_stream(self._side)


class _Passing:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def passed(self) -> bool:
        return self._event.query()


class OneAfterTheOther:
    """A CPU, where all work is done when the call that asks for it returns; to run what a GPU would without one."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See `Streams`."""
        yield

    def join(self) -> None:
        """See `Streams`."""

    def mark(self) -> Mark:
        """See `Streams`."""
        return _Passed()

    def share(self, tensor: Tensor) -> None:
        """See `Streams`."""


class _Passed:
    def passed(self) -> bool:
        return True


def streams_of(device: torch.device) -> Streams | None:
    """Those of a device, if it has any. With THINWIRE_LANE=stream, for tests and reports of trouble, a CPU has too.

    Raises:
        ValueError: for another value of the variable.
    """
    wanted = os.environ.get("THINWIRE_LANE", "")
    if wanted not in ("", "stream"):
        raise ValueError(f"THINWIRE_LANE={wanted!r}: expected 'stream', or nothing")
    if device.type == "cuda":
        return CudaStreams(device)
    return OneAfterTheOther() if wanted else None


_SPINS = 1000
_NAP = 5e-5
"""Seconds."""


def wait_for(mark: Mark, seconds: float | None) -> bool:
    """Wait until a device has come to a mark, but no longer than that; whether it has."""
    end = None if seconds is None else time.monotonic() + seconds
    spins = 0
    while not mark.passed():
        if end is not None and time.monotonic() > end:
            return False
        spins += 1
        # CUDA's own wait has no limit. And a thread that only asks would keep others from the interpreter.
        time.sleep(0.0 if spins < _SPINS else _NAP)
    return True

"""The two streams of a device: the current one, which computes gradients, and a side stream for exchanges."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in the work of the side stream, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has reached it."""
        ...


class Streams(Protocol):
    """The current stream and the side stream of a device. No method waits for the device."""

    def aside(self) -> AbstractContextManager[None]:
        """Enqueue the work of the block on the side stream, after the work that the current stream has now."""
        ...

    def join(self) -> None:
        """Make the current stream wait for the work that the side stream has now."""

    def record_event(self) -> Event:
        """The point at which the side stream has done its present work."""
        ...

    def share(self, tensor: Tensor) -> None:
        """Let the side stream use a tensor: when the tensor is freed, its memory is not reused before the side stream
        has done the work that it has then."""


class CudaStreams:
    """The streams of a GPU.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        # High priority: other ranks wait for exchanges, and only this one for its gradients.
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

    def record_event(self) -> Event:
        """See `Streams`."""
        event = torch.cuda.Event()
        event.record(self._side)
        return event

    def share(self, tensor: Tensor) -> None:
        """See `Streams`."""
        tensor.record_stream(self._side)


class SynchronousStreams:
    """A CPU in place of a GPU, to run `StreamTransport` without one: work is done when its call returns."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See `Streams`."""
        yield

    def join(self) -> None:
        """See `Streams`."""

    def record_event(self) -> Event:
        """See `Streams`."""
        return _ReachedEvent()

    def share(self, tensor: Tensor) -> None:
        """See `Streams`."""


class _ReachedEvent:
    def query(self) -> bool:
        return True


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None for a CPU, unless THINWIRE_LANE=stream asks for a stand-in, for tests and bug
    reports.

    Raises:
        ValueError: another value of the variable.
    """
    wanted = os.environ.get("THINWIRE_LANE", "")
    if wanted not in ("", "stream"):
        raise ValueError(f"THINWIRE_LANE={wanted!r}: expected 'stream', or nothing")
    if device.type == "cuda":
        return CudaStreams(device)
    return SynchronousStreams() if wanted else None


_YIELDS = 1000
_SLEEP_SECONDS = 5e-5


def wait_for(event: Event, seconds: float | None) -> bool:
    """Wait until the device has reached an event, or the time is over.

    Returns:
        Whether the device has reached it.
    """
    end = None if seconds is None else time.monotonic() + seconds
    polls = 0
    while not event.query():
        if end is not None and time.monotonic() > end:
            return False
        polls += 1
        # CUDA's own wait has no timeout. Sleeping lets other threads have the interpreter.
        time.sleep(0.0 if polls < _YIELDS else _SLEEP_SECONDS)
    return True

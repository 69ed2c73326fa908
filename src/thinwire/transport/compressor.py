"""The interface of a compressor, as the transport uses it."""

from __future__ import annotations

from typing import Protocol

from thinwire.transport.buffers import Frame, PacketBuffers, Payload
from thinwire.transport.state import State


class Compressor(Protocol):
    """How workers fill the packets of a channel, how owners merge them, and what both remember.

    How a part of a parameter is encoded and an answer applied is not part of the interface. Kernels fuse that with the
    arithmetic of an update rule, in one pass over memory, so the arguments differ.
    """

    @property
    def payload(self) -> Payload:
        """The size of what it puts into packets."""
        ...

    def bind(self, buffers: PacketBuffers) -> None:
        """Use these packet buffers from now on."""

    def seal(self, frame: Frame) -> None:
        """Complete a bucket's packets with what depends on the whole bucket, such as scales. Runs on a lane."""

    def merge(self, frame: Frame, shard: int) -> None:
        """As the owner of `shard`, compute the answer from the packets of all workers. Runs on a lane."""

    def state(self) -> State:
        """What must be saved for a run to continue with the same bits."""
        ...

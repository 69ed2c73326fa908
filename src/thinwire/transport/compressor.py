"""The interface between a compressor and the transport."""

from __future__ import annotations

from typing import Protocol

from thinwire.transport.buffers import Frame, PacketBuffers, Payload


class Compressor(Protocol):
    """Fills the packets of a channel, and merges them at the owner of a shard.

    Each compressor has its own methods to encode a parameter and to apply an answer; its caller uses those directly.
    """

    @property
    def payload(self) -> Payload:
        """The size of its packets."""
        ...

    def bind(self, buffers: PacketBuffers) -> None:
        """Use these packet buffers from now on."""

    def seal(self, frame: Frame) -> None:
        """Complete the packets of a bucket when all its parameters are encoded. Called by the transport."""

    def merge(self, frame: Frame, shard: int) -> None:
        """As the owner of `shard`, compute the answer to the received packets. Called by the transport."""

"""How the packets of a channel are filled by workers and answered by the owners of shards: one module a compressor."""

from __future__ import annotations

from typing import Protocol

from thinwire.transport.buffers import Frame, PacketBuffers, Payload


class Compressor(Protocol):
    """What all of them can do. How a parameter is encoded and an answer applied is each one's own."""

    @property
    def payload(self) -> Payload:
        """What its packets carry."""
        ...

    def bind(self, buffers: PacketBuffers) -> None:
        """Get to know where the packets lie."""

    def seal(self, frame: Frame) -> None:
        """Add to a bucket's packets what is known only when all its parameters are encoded. Runs on a lane."""

    def merge(self, frame: Frame, shard: int) -> None:
        """As the owner of `shard`, turn the packets received into an answer. Runs on a lane."""

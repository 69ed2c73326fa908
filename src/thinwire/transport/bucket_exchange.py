"""The state of one bucket during an exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from thinwire.errors import CorruptPacket
from thinwire.transport import packet
from thinwire.transport.buffers import Frame, Part
from thinwire.transport.channel import Channel

EncodeMean = Callable[[int, Part, Tensor | None], int]
"""Encodes one part of the parameter at a position from the node's mean gradient, or from the state alone if that is
None. Returns the flags to raise."""


class Presence:
    """For every bucket, one bit per parameter: whether this worker has a gradient for it.

    Args:
        buckets: the number of buckets.
    """

    def __init__(self, buckets: int) -> None:
        self.now = [0] * buckets
        """Gradients of this step. In a hierarchical topology the transport adds those of the rest of the node."""
        self.before = [0] * buckets
        """Gradients of earlier steps whose updates are part of this exchange."""

    def of(self, bucket: int) -> int:
        """The presence bits to send for a bucket."""
        return self.now[bucket] | self.before[bucket]


@dataclass
class BucketExchange:
    """One bucket on its way from encode to commit. The caller makes one per bucket; the transport updates it."""

    channel: Channel
    frame: Frame
    step: int
    flags: int
    """Raised by this rank and by the ranks whose packets it has received."""
    presence: Presence
    encode_mean: EncodeMean | None = None
    """Required in a hierarchical topology, where gradients are encoded after the node has averaged them."""
    has_gradients: bool = True
    """False to exchange the state as it is: there are no gradients to average."""
    refusal: CorruptPacket | None = None
    """The first packet that this rank could not accept. Other ranks wait for its next packet, so it still sends one,
    with the flag REFUSED."""

    @property
    def index(self) -> int:
        """The number of the bucket."""
        return self.frame.bucket.index

    def header(self, packets: Tensor, sender: int) -> packet.Header:
        """The header of these packets of the bucket when `sender` sends them."""
        length = packets.shape[1] - packet.HEADER_BYTES
        fingerprint = self.channel.layout.fingerprint
        return packet.Header(self.step, self.frame.bucket.index, sender, length, fingerprint, self.flags)

    def add_flags(self, sender: int, flags: int) -> None:
        """Add the flags of a received packet."""
        self.flags |= flags
        if flags & packet.REFUSED:
            self.refuse(packet.refused_by(sender, self.step))

    def refuse(self, error: CorruptPacket) -> None:
        """Record a packet that cannot be accepted."""
        self.refusal = self.refusal or error
        self.flags |= packet.REFUSED

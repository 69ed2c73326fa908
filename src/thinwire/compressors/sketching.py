"""A compressor that adds buckets, one after another, to a count sketch. Its packets are empty."""

from __future__ import annotations

from torch import Tensor

from thinwire.compressors.codecs.count_sketch import CountSketch
from thinwire.compressors.local import NO_PAYLOAD
from thinwire.transport.buffers import Frame, PacketBuffers
from thinwire.transport.state import State


class Sketching:
    """Adds a worker's values to its sketch, in the order of the flat space because float sums depend on the order.

    Args:
        values: the values to be sketched, of this rank's slices.
        into: the codec and the packet that holds the sketch; None if nothing is sketched.
    """

    payload = NO_PAYLOAD

    def __init__(self, values: Tensor, into: tuple[CountSketch, Tensor] | None) -> None:
        self._values = values
        self._into = into

    def bind(self, buffers: PacketBuffers) -> None:
        """See `Compressor`."""

    def seal(self, frame: Frame) -> None:
        """Add a bucket to the sketch."""
        if self._into is not None:
            sketch, packet = self._into
            bucket = frame.bucket
            first = bucket.own_start - bucket.state_shift
            sketch.add(self._values[first : first + bucket.slice_elements], packet, bucket.own_start)

    def merge(self, frame: Frame, shard: int) -> None:
        """See `Compressor`."""

    def state(self) -> State:
        """See `Compressor`."""
        return State()

"""Reads the answers of an exchange shard by shard, without a vector as long as the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.compressors._packets import bytes_of, naming_packet
from thinwire.compressors.codecs import Codec
from thinwire.transport.buffers import PacketBuffers, Part
from thinwire.transport.layout import Layout


class Answers:
    """The decoded answer of one shard at a time. Reading parts in flat order decodes each shard once.

    Args:
        layout: the flat space.
        codec: the codec of the answers.
    """

    def __init__(self, layout: Layout, codec: Codec) -> None:
        self._codec = codec
        self._values = torch.empty(longest_shard(layout), dtype=torch.float32, device=layout.device)
        self._decoded: int | None = None

    def bind(self, buffers: PacketBuffers) -> None:
        """See `Compressor`."""
        self._frames = buffers.frames
        self.forget()

    def forget(self) -> None:
        """Drop what was decoded, because the answers change."""
        self._decoded = None

    def read(self, part: Part, into: Tensor, prepare: Callable[[int], None] = lambda _: None) -> None:
        """Write the answer for a part of a parameter into a vector of the parameter's length.

        Args:
            part: which part.
            into: the vector.
            prepare: called with the number of a shard before its answer is decoded, to set the codec's keys.

        Raises:
            CorruptPacket: if the codec rejects an answer.
        """
        bucket = part.frame.bucket
        for element, in_param, count, _, _, number in part.down_runs.tolist():
            if number != self._decoded:
                prepare(number)
                self._decode(number)
            first = element - bucket.start - (number - bucket.shard_number(0)) * bucket.shard_elements
            into[in_param : in_param + count] = self._values[first : first + count]

    def _decode(self, number: int) -> None:
        self._decoded = None
        index, shard = divmod(number, self._frames[0].bucket.shards)
        frame = self._frames[index]
        length = frame.bucket.shard_elements
        values = self._values[:length].zero_()
        with naming_packet(f"the answer for shard {shard} of bucket {index}"):
            self._codec.decode(bytes_of(frame.answers[shard], self._codec, length), values)
        self._decoded = number


def longest_shard(layout: Layout) -> int:
    """The number of elements of the longest shard."""
    return max((bucket.shard_elements for bucket in layout.buckets), default=0)

"""An all-reduce of encodings: those that can be added are averaged over workers without decoding them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.compressors.codecs import AddingCodec
from thinwire.compressors.dense import Dense
from thinwire.kernels.ops import Kernels
from thinwire.transport import packet
from thinwire.transport.bucket_exchange import BucketExchange, Presence
from thinwire.transport.buffers import Part
from thinwire.transport.channel import Channel
from thinwire.transport.layout import Layout, bucket_elements
from thinwire.transport.memory import HOST
from thinwire.transport.topology import Topology
from thinwire.transport.transport import Transport


class EncodedAllReduce:
    """Averages encodings of vectors over workers, and sums them over the ranks of each worker.

    A rank of a node encodes its own slices, and zeros for the slices of the other ranks.

    Args:
        contents: for each vector, its codec and its length.
        topology: which ranks form a worker.
        kernels: the backend.
        channel: a number that distinguishes the channels that share connections.

    Raises:
        TypeError: for a codec that is not an `AddingCodec`: the sum of its encodings has no meaning.
    """

    def __init__(
        self, contents: Sequence[tuple[AddingCodec, int]], topology: Topology, kernels: Kernels, channel: int = 0
    ) -> None:
        for codec, _ in contents:
            if not isinstance(codec, AddingCodec):
                raise TypeError(
                    f"{type(codec).__name__} in an all-reduce: the sum of its encodings is not the encoding of the sum."
                    " Expected an AddingCodec, such as CountSketch or Floats"
                )
        sizes = [codec.nbytes(length) for codec, length in contents]
        memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=HOST)
        self.packets = list(memory.split(sizes))
        """One per vector. Encode into it before `exchange`; afterwards it holds the encoding of the mean."""
        self._floats = memory.view(torch.float32)
        self._topology = topology
        self._kernels = kernels
        numel = self._floats.numel()
        layout = Layout(
            [numel],
            topology.workers,
            bucket_elements(None, numel),
            slices=topology.slices,
            own_slice=topology.own_slice,
        )
        self._dense = Dense(kernels)
        self._channel = Channel(self._dense, layout, topology, channel)

    def exchange(self, transport: Transport, step: int, flags: int) -> int:
        """Average the packets of all ranks, which must all call it in this step; return the flags of all ranks."""
        channel, buffers, meter = self._channel, self._channel.buffers, transport.meter
        presence = Presence(len(buffers.frames))
        transport.begin(channel, step)
        node = transport.node
        encode_mean = None if node is None else self._encode_mean
        for part in buffers.parts[0]:
            bucket = part.frame.bucket
            presence.now[bucket.index] = part.presence
            if node is None:
                with meter.encode:
                    self._dense.encode(part, self._floats, 1.0)
            else:
                node.stage(0, bucket, self._floats, 1.0)
            transport.submit(BucketExchange(channel, part.frame, step, flags, presence, encode_mean))
        with meter.exposed_wait:
            transport.wait()
        for part in buffers.parts[0]:
            for _, start, count, byte, *_ in part.down_runs.tolist():
                self._floats[start : start + count] = buffers.answers[byte : byte + 4 * count].view(torch.float32)
        return transport.flags_seen

    def _encode_mean(self, _: int, part: Part, mean: Tensor | None) -> int:
        # The node computes the mean of slices and zeros; times the number of slices, it is their sum.
        return packet.NONFINITE if self._dense.encode(part, mean, float(self._topology.slices)) else 0

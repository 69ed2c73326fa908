"""The exchanges of a set of tensors with the other ranks: any compressor, no optimizer.

A session owns what all exchanges of these tensors share: their layout, one channel per compressor, the connections to
the other ranks, and the transport. Its user encodes; the session sends a bucket as soon as it is complete::

    session = Session([p.numel() for p in params], device, peers, topology)
    session.open_channels({"dense": Dense(session.kernels)})
    session.connect(name)                                   # `name` is new, and the same on all ranks

    session.begin_step(step, "dense")
    for position, grad in enumerate(gradients):             # in any order, from a hook of autograd or from a loop
        session.encode(position, grad, 1.0, encoder)
    flags = session.wait()                                  # the answers are in the channel's packet buffers
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from thinwire.kernels import ops
from thinwire.kernels.modes import Scale
from thinwire.metrics import Meter
from thinwire.transport import packet
from thinwire.transport.bucket_exchange import BucketExchange, Presence
from thinwire.transport.buffers import Part
from thinwire.transport.channel import Channel
from thinwire.transport.compressor import Compressor
from thinwire.transport.layout import Layout, bucket_elements
from thinwire.transport.open_transport import open_transport
from thinwire.transport.peers import Peers
from thinwire.transport.stream_transport import SideStream, StreamTransport
from thinwire.transport.topology import Topology
from thinwire.transport.transport import Transport

LOCAL = "local"
"""The name of a channel whose packets stay inside the node."""


class Encoder(Protocol):
    """Fills packets for a session."""

    def before_exchange(self) -> None:
        """Prepare for an exchange. Called before its first tensor is encoded."""

    def encode(self, position: int, part: Part, grad: Tensor | None, scale: Scale) -> bool | None:
        """Write what is sent for a part of a tensor into the packets, given its gradient, to be multiplied by `scale`.

        Returns:
            Whether the gradient was not finite; None if only the device knows.
        """
        ...

    def for_lanes(self) -> Encoder:
        """The same with the settings of this moment. Lanes encode later, in hierarchical topologies."""
        ...


class Session:
    """See the module.

    Args:
        numels: the number of elements of each tensor.
        device: of the tensors.
        peers: the ranks that exchange.
        topology: which of them form a worker.
        bucket_mb: the size of a bucket in megabytes of fp32; None for about `buckets` of them.
        buckets: see `bucket_elements`.
        node_dtype: the dtype of gradients on the link inside a node.
        meter: where bytes and seconds are counted.

    Raises:
        ValueError: if the process group cannot exchange tensors on `device`.
    """

    def __init__(
        self,
        numels: Sequence[int],
        device: torch.device,
        peers: Peers,
        topology: Topology,
        *,
        bucket_mb: float | None = None,
        buckets: int = 4,
        node_dtype: torch.dtype = torch.float32,
        meter: Meter | None = None,
    ) -> None:
        peers.check_backend(device)
        self.peers = peers
        self.topology = topology
        self.layout = Layout(
            numels,
            topology.workers,
            bucket_elements(bucket_mb, sum(numels), buckets),
            slices=topology.slices,
            own_slice=topology.own_slice,
            device=device,
        )
        self.side = SideStream.of(self.layout)
        """The side stream of the device; None on a CPU, where lanes are threads."""
        kernels = ops.backend(device)
        self.kernels = kernels if self.side is None else self.side.bind(kernels)
        self.meter = meter or Meter()
        self.channels: dict[str, Channel] = {}
        self._node_dtype = node_dtype
        self._transport: Transport | None = None
        self.repeating = False
        """Whether the exchange under way is one of the state as it is, without gradients."""

    def open_channels(self, compressors: Mapping[str, Compressor]) -> None:
        """Allocate packet buffers for each compressor. The channel named LOCAL stays inside the node."""
        self.channels = {
            name: Channel(
                compressor, self.layout, self.topology, number, local=name == LOCAL, node_dtype=self._node_dtype
            )
            for number, (name, compressor) in enumerate(compressors.items())
        }

    # Connections -----------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether exchanges are possible."""
        return self._transport is not None

    @property
    def transport(self) -> Transport:
        """What moves packets, while connected."""
        assert self._transport is not None, "a session is connected before anything is encoded"
        return self._transport

    def connect(self, name: str) -> None:
        """Connect this rank to those it exchanges with. All ranks call this with the same, new name.

        Raises:
            PeerLost: if a rank does not connect.
        """
        device = self.layout.device
        self._transport = open_transport(self.peers, self.topology, name, device, self.kernels, self.meter, self.side)

    def disconnect(self) -> None:
        """End threads and connections until `connect` makes new ones.

        Ranks that still expect packets from this one fail at once. They cannot mistake packets of another stage for
        the ones they expect.
        """
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    # One exchange ----------------------------------------------------------------------------------------------------

    def begin_step(self, step: int, channel: str, *, flags: int = 0, earlier: Sequence[int] | None = None) -> None:
        """Discard what was encoded. The next gradients belong to a new step.

        Args:
            step: its number, from 1.
            channel: the name of the channel that it uses first.
            flags: what the headers of its packets say.
            earlier: per bucket, the presence bits of earlier steps that this exchange includes.
        """
        self.step = step
        self.repeating = False
        self.encoded = [False] * len(self.layout.slots)
        """By position in the flat space, whether the tensor is encoded."""
        self.presence = Presence(len(self.layout.buckets))
        if earlier is not None:
            self.presence.before = list(earlier)
        self.flags = flags
        """Raised by this rank in this step, and those that its packets start with."""
        self._begin_exchange(channel)

    def _begin_exchange(self, name: str) -> None:
        self.channel = self.channels[name]
        """The one that the exchange under way uses."""
        if self.channel.released:
            self.channel.allocate()
        self._under_way = False
        self._missing = [len(parts) for parts in self.channel.buffers.contents]
        self._submitted = 0

    def uses(self, name: str) -> bool:
        """Whether the exchange under way uses this channel."""
        return self.channel is self.channels.get(name)

    def encode(self, position: int, grad: Tensor | None, scale: Scale, encoder: Encoder) -> None:
        """Encode one tensor, and submit all buckets that are complete now.

        In a hierarchical topology the gradient is only staged. A lane encodes the mean over the node.
        """
        self.encoded[position] = True
        self._begin(encoder)
        node, missing = self.transport.node, self._missing
        for part in self.channel.buffers.parts[position]:
            bucket = part.frame.bucket
            if grad is not None:
                self.presence.now[bucket.index] |= part.presence
            if node is None:
                self.flags |= self._encode_part(encoder, position, part, grad, scale)
            elif not self.repeating:
                with self.meter.stage:
                    node.stage(position, bucket, grad, scale)
            missing[bucket.index] -= 1
            if not missing[bucket.index]:
                self._submit_complete(encoder)

    def encode_joined(self, positions: Sequence[int], part: Part, grad: Tensor, scale: Scale, encoder: Encoder) -> None:
        """As `encode` for several tensors of one bucket, given as one: `part` has the runs of all, and `grad` leads to
        all of their gradients. Not in a hierarchical topology."""
        bucket = part.frame.bucket.index
        self._begin(encoder)
        for position in positions:
            self.encoded[position] = True
        self.presence.now[bucket] |= part.presence
        self.flags |= self._encode_part(encoder, positions[0], part, grad, scale)
        self._missing[bucket] -= len(positions)
        self._submit_complete(encoder)

    def _begin(self, encoder: Encoder) -> None:
        if not self._under_way:
            self._under_way = True
            encoder.before_exchange()
            self.transport.begin(self.channel, self.step)

    def _submit_complete(self, encoder: Encoder) -> None:
        # In order, whatever the order of the gradients: all ranks exchange the same bucket at the same time.
        missing = self._missing
        while self._submitted < len(missing) and not missing[self._submitted]:
            self._submit(self._submitted, encoder)
            self._submitted += 1

    def _encode_part(self, encoder: Encoder, position: int, part: Part, grad: Tensor | None, scale: Scale) -> int:
        with self.meter.encode:
            return packet.NONFINITE if encoder.encode(position, part, grad, scale) else 0

    def _submit(self, bucket: int, encoder: Encoder) -> None:
        transport, frame = self.transport, self.channel.buffers.frames[bucket]
        encode_mean = None
        if transport.node is not None:
            encode_mean = functools.partial(self._encode_mean, encoder.for_lanes())
        exchange = BucketExchange(self.channel, frame, self.step, self.flags, self.presence, encode_mean)
        exchange.has_gradients = not self.repeating
        transport.submit(exchange)

    def _encode_mean(self, encoder: Encoder, position: int, part: Part, mean: Tensor | None) -> int:
        return self._encode_part(encoder, position, part, mean, 1.0)

    def encode_rest(self, encoder: Encoder) -> None:
        """Encode all other tensors without gradients, so that an exchange can end that no step will end."""
        if any(self.encoded):
            for position, encoded in enumerate(self.encoded):
                if not encoded:
                    self.encode(position, None, 1.0, encoder)

    def repeat(self, channel: str, encoder: Encoder) -> int:
        """Exchange the state as it is, without gradients and with the known presence; the flags of all ranks."""
        self._begin_exchange(channel)
        self.repeating = True
        for position in range(len(self.encoded)):
            self.encode(position, None, 1.0, encoder)
        self.repeating = False
        return self.wait()

    def wait(self, *, defer: bool = False) -> int:
        """Wait until all buckets are exchanged; the flags that any rank has raised.

        Args:
            defer: on a device, do not wait: let the stream wait, let gates on the device decide, and read the outcome
                later with `outcomes`.

        Raises:
            PeerLost, CorruptPacket, Disagreement: as `Transport.wait`.
        """
        assert self._submitted == len(self._missing), "all buckets are submitted"
        transport = self.transport
        if defer and isinstance(transport, StreamTransport) and self.side is not None:
            self.side.deferred = True
            transport.join()
            return 0
        with self.meter.exposed_wait:
            transport.wait()
        return transport.flags_seen

    def leave(self) -> None:
        """Let the exchange end by itself, and forget which tensors are encoded. `wait` comes before the next step."""
        assert self._submitted == len(self._missing), "all buckets are submitted"
        self.transport.commit()
        self.encoded = [False] * len(self.layout.slots)

    def present(self) -> list[int]:
        """The positions of the tensors that have a gradient on some worker; all of them if only the device knows."""
        if self.deferred:
            return list(range(len(self.encoded)))  # gates on the device keep out those without a gradient
        return self.transport.present(self.channel)

    # Deferred outcomes, on devices -----------------------------------------------------------------------------------

    @property
    def deferred(self) -> bool:
        """Whether the step under way, or the last one, was left to the device."""
        return self.side is not None and self.side.deferred

    def outcomes(self) -> list[tuple[int, int, list[int]]]:
        """The step, flags and present positions of each deferred step whose outcome was not read yet.

        Raises:
            PeerLost: if the device does not finish an exchange.
            CorruptPacket: on all ranks, if one of them refused a packet. Nothing was applied since.
        """
        if not isinstance(self._transport, StreamTransport) or self.side is None or not self.side.deferred:
            return []
        self.side.deferred = False
        found = self._transport.outcomes(before=self.step)
        return [(step, outcome.flags, outcome.present) for step, outcome in found]

    def gate(self, position: int) -> None:
        """Select the gate for the kernels that follow: that of a tensor or, beyond the last, that of the whole step."""
        if self.side is not None:
            self.side.report.gate.parameter = position

    def step_gate(self) -> Tensor | None:
        """On a device, a flag that is not 0 if a deferred step is taken; else None."""
        return self.side.report.gate.open[-1] if self.side is not None and self.side.deferred else None

    def overflow(self) -> Tensor | None:
        """On a device, 1.0 if a gradient of a deferred step was not finite on any rank, else 0.0; else None."""
        return self.side.report.overflow() if self.side is not None and self.side.deferred else None

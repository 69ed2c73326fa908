"""The transport: exchanges the packets of all buckets between ranks.

Each bucket passes the same stages, in this order:

    encode → seal → send → merge → answer → collect → commit

The caller encodes. In a hierarchical topology the transport calls it back with the mean gradient of the node instead.
After the commit round the answers are in the packet buffers of the channel, equal on all ranks, and the caller applies
them. `thinwire.transport.lane_transport` has the stages on CPUs, `thinwire.transport.stream_transport` on GPUs.

    transport = open_transport(...)
    transport.begin(channel, step)
    for frame in channel.buffers.frames:
        ...                                    # encode, or stage gradients in transport.node
        transport.submit(BucketExchange(channel, frame, step, flags, presence))
    transport.wait()
    if not transport.flags_seen & NONFINITE:
        ...                                    # apply channel.buffers.answers to transport.present(channel)
"""

from __future__ import annotations

import abc
import atexit
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from thinwire.kernels.ops import Kernels
from thinwire.metrics import Meter
from thinwire.transport.bucket_exchange import BucketExchange
from thinwire.transport.buffers import Frame
from thinwire.transport.channel import Channel
from thinwire.transport.connections import Connection, Connections
from thinwire.transport.lane import Failure
from thinwire.transport.layout import Layout
from thinwire.transport.node import Node


class Transport(abc.ABC):
    """Exchanges buckets, one exchange after another.

    Args:
        connections: of this rank. The transport closes them.
        kernels: the backend.
        meter: counts bytes and seconds.
    """

    def __init__(self, connections: Connections, kernels: Kernels, meter: Meter) -> None:
        self.meter = meter
        self.flags_seen = 0
        """The flags that any rank has raised in the last exchange; complete after `wait`."""
        self.agreed = 0
        """32 bits that must be equal on all ranks when they commit; not compared in a local exchange."""
        self.node: Node | None = None
        """Averages the gradients of the exchange under way over the node; None in a flat topology."""
        self._connections = connections
        self._kernels = kernels
        self._nodes: dict[tuple[Layout, torch.dtype], Node] = {}
        # Other ranks may wait for this one, which will send nothing more: closed connections end their waits.
        self._failure = Failure(on_stop=[connection.abort for connection in connections.all])
        _open.add(self)

    @abc.abstractmethod
    def begin(self, channel: Channel, step: int) -> None:
        """Begin an exchange: prepare to receive all its packets. The exchange before it must have been waited for."""

    @abc.abstractmethod
    def submit(self, bucket: BucketExchange) -> None:
        """Send a bucket whose parameters are encoded, or staged in `node`.

        All ranks submit all buckets of an exchange in the same order.
        """

    @abc.abstractmethod
    def refuse(self, error: RuntimeError) -> None:
        """Do not commit the exchange under way. All ranks complete it. Then `wait` raises `error` on this rank, and
        CorruptPacket on the others."""

    @abc.abstractmethod
    def commit(self) -> None:
        """Let the exchange under way commit without the caller, who has nothing to add to it. `wait` ends it later."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Commit, and wait until the exchange is complete. Afterwards the answers do not change, and the packets may.

        Raises:
            PeerLost: a rank is dead, frozen or unreachable.
            CorruptPacket: on all ranks, when one of them received a packet that it could not accept.
            Disagreement: on all ranks, if they have different `agreed`.
            RuntimeError: the exchange has failed for another reason. Every later call raises the same error.
        """

    @abc.abstractmethod
    def present(self, channel: Channel) -> list[int]:
        """The positions of the parameters that had a gradient on some worker, in the last exchange that was waited
        for."""

    @abc.abstractmethod
    def check_refusal(self) -> None:
        """Abort if a packet was refused in a local exchange.

        `wait` does not raise then: the rank first reports the refusal to the other nodes, with the flag REFUSED in
        another exchange of the same step, if there is one.

        Raises:
            CorruptPacket: naming the packet.
        """

    @abc.abstractmethod
    def abort(self, cause: BaseException) -> None:
        """Exchange nothing more, and end the waits of the other ranks. From now on `wait` raises `cause`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Finish the exchange under way, then end threads and connections."""

    def close_at_exit(self) -> None:
        """Close when the interpreter exits. No thread may run inside torch after that."""
        self.close()

    @contextmanager
    def abort_on_error(self) -> Iterator[None]:
        """Abort if the block raises, for example on Ctrl-C. Part of a step has been sent then: a rank that continued
        would apply the rest of it."""
        try:
            yield
        except BaseException as error:
            self.abort(error)
            raise

    # Used by both implementations ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _make_node(self, channel: Channel, connection: Connection) -> Node:
        """Connect the staging memory of a layout to the ranks of the node."""

    def _node_of(self, channel: Channel) -> Node | None:
        """The node of a channel. All channels of a layout share one, because its memory is as large as the model."""
        if self._connections.node is None:
            return None
        key = (channel.layout, channel.node_dtype)
        if key not in self._nodes:
            self._nodes[key] = self._make_node(channel, self._connections.node)
        return self._nodes[key]

    def _encode_means(self, node: Node, bucket: BucketExchange) -> None:
        """Average the gradients of a bucket over the node, and let the caller encode the means."""
        assert bucket.encode_mean is not None, "in a hierarchical topology the caller encodes means"
        present = 0
        if bucket.has_gradients:
            node.scatter(bucket)
            present = bucket.presence.now[bucket.index]
        for position, part in bucket.channel.buffers.contents[bucket.index]:
            if part.up_runs.shape[0]:
                mean = node.mean(bucket, part.up_runs) if present & part.presence else None
                bucket.flags |= bucket.encode_mean(position, part, mean)

    def _count(self, rounds: int, sent: int, received: int) -> None:
        self.meter.rounds += rounds
        self.meter.bytes_sent += sent
        self.meter.bytes_received += received

    def _merge_presence(self, frame: Frame, shard: int) -> None:
        """Write into the answer which parameters have a gradient on any worker."""
        self._kernels.any_of(
            frame.received, frame.up_presence, frame.presence_words, frame.answers[shard], frame.down_presence
        )


_open: weakref.WeakSet[Transport] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for transport in list(_open):
        transport.close_at_exit()

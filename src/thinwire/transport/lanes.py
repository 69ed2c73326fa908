"""What becomes of a bucket once its gradients are in: it is sent, answered and collected, each on a lane of its own.

A *channel* is one way for buckets to travel: a compressor, the packets, and who exchanges them. An optimizer may have
several, such as dense ones for its warm-up and signs afterwards; a step uses one of them, the same on all ranks.
"""

from __future__ import annotations

import abc
import atexit
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from thinwire.errors import CorruptPacket
from thinwire.kernels.ops import Kernels
from thinwire.metrics import Meter
from thinwire.transport import packet
from thinwire.transport.buffers import Frame, PacketBuffers, Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.connections import Connection
from thinwire.transport.device_node import DeviceNode
from thinwire.transport.exchange import Exchange, Job
from thinwire.transport.lane import Failure, Lane
from thinwire.transport.layout import Layout
from thinwire.transport.messages import hang_up
from thinwire.transport.node import Node, Staging
from thinwire.transport.rounds import Rounds
from thinwire.transport.topology import Topology

AnyNode = Node | DeviceNode


class Channel:
    """One way for buckets to travel.

    Args:
        compressor: what packets carry.
        layout: the flat space.
        topology: who takes part.
        number: of this channel among those that share connections.
        local: whether packets stay inside the node.
    """

    def __init__(
        self, compressor: Compressor, layout: Layout, topology: Topology, number: int, *, local: bool = False
    ) -> None:
        self.compressor = compressor
        self._number = number
        self._layout = layout
        self._topology = topology.within_node() if local else topology
        self.local = local
        self._exchange: Exchange | None = None
        self._rounds: Rounds | None = None
        self.restore()

    def restore(self) -> None:
        """Have memory for the packets."""
        alone = self.local or self._topology.workers == 1
        self.buffers = PacketBuffers(self._layout, self.compressor.payload, alone, self._number)
        self.compressor.bind(self.buffers)
        self.released = False

    def release(self) -> None:
        """Give the memory of the packets back, until `restore`."""
        if self.released:
            return
        empty = Layout([], self._layout.workers, 1, slices=self._layout.slices)
        self.buffers = PacketBuffers(empty, self.compressor.payload, alone=True)
        self.compressor.bind(self.buffers)
        self._exchange = self._rounds = None
        self.released = True

    def exchange(self, link: Link) -> Exchange:
        """Who sends and receives these packets, on the lanes of a CPU."""
        if self._exchange is None:
            self._exchange = Exchange(self.buffers, self._topology, self._connection(link), link.kernels, link.meter)
        return self._exchange

    def rounds(self, link: Link, status: Tensor) -> Rounds:
        """The same on a device."""
        if self._rounds is None:
            self._rounds = Rounds(
                self.buffers, self._topology, self._connection(link), link.kernels, link.meter, status
            )
        return self._rounds

    def disconnect(self) -> None:
        """Forget the connections over which packets have travelled."""
        self._exchange = self._rounds = None

    def _connection(self, link: Link) -> Connection | None:
        return None if self.local else link.slice_connection


@dataclass(frozen=True)
class Link:
    """Whom this rank is joined to, and by what; made whenever all ranks have agreed."""

    slice_connection: Connection | None
    """To the ranks that work on the same slice; None for a worker without peers."""
    node_connection: Connection | None
    """To the ranks of the node, in a hierarchical topology."""
    node: AnyNode | None
    """What these do for gradients."""
    kernels: Kernels
    meter: Meter
    threaded: bool

    @property
    def connections(self) -> list[Connection]:
        """All of them."""
        return [each for each in (self.slice_connection, self.node_connection) if each is not None]


@dataclass(frozen=True)
class _Trip:
    """What the buckets of one exchange need on their way."""

    compressor: Compressor
    buffers: PacketBuffers
    exchange: Exchange
    node: Node | None
    local: bool


class Presence:
    """For every bucket, as bits, which of its parameters have a gradient.

    Args:
        buckets: how many there are.
    """

    def __init__(self, buckets: int) -> None:
        self.now = [0] * buckets
        """In this step."""
        self.before = [0] * buckets
        """In steps before it that this exchange is about too."""

    def of(self, bucket: int) -> int:
        """What packets say of a bucket."""
        return self.now[bucket] | self.before[bucket]


EncodeMean = Callable[[int, Part, Tensor | None], int]
"""Applies the local rule to a part of the parameter at some position, given the node's mean gradient; returns flags."""


def encode_means(node: Staging, buffers: PacketBuffers, job: Job, present: int, encode_mean: EncodeMean) -> int:
    """Apply the local rule to a bucket, given the node's mean of those that are present; the flags raised."""
    flags = 0
    for position, part in buffers.contents[job.frame.bucket.index]:
        if part.up_runs.shape[0]:
            mean = node.mean(job, part.up_runs) if present & part.presence else None
            flags |= encode_mean(position, part, mean)
    return flags


class Transport(abc.ABC):
    """The buckets of one exchange after another, by whatever way.

    Args:
        link: whom this rank is joined to.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.flags_seen = 0
        """What any rank has raised in the exchange under way or just over."""
        _open.add(self)
        # Others may wait for ranks that are well, but will say nothing more: they have lost somebody too.
        self._failure = Failure(then=[functools.partial(_hang_up, connection) for connection in link.connections])

    @abc.abstractmethod
    def begin(self, channel: Channel, node: AnyNode | None, step: int) -> None:
        """Be ready for all packets of an exchange, and for what the ranks of the node have to tell each other."""

    @abc.abstractmethod
    def submit(self, job: Job, presence: Presence, encode_mean: EncodeMean | None, *, gradients: bool) -> None:
        """Send a bucket on its way.

        Args:
            job: the bucket, and what its headers say.
            presence: which parameters take part; in a hierarchical topology it comes to include those of the node.
            encode_mean: in a hierarchical topology, where the gradients of a node are averaged before they are encoded.
            gradients: whether there are any; else the state is encoded as it is.
        """

    @abc.abstractmethod
    def drain(self) -> None:
        """Wait for all that is under way, so that nobody changes what others read.

        Raises:
            PeerLost: when a rank is dead, frozen or out of reach.
            CorruptPacket: on all ranks, when one of them got a packet that it could not accept.
            RuntimeError: when an exchange has failed for another reason. All of them now and ever after.
        """

    @abc.abstractmethod
    def refuse(self) -> None:
        """Stop because of a packet that was refused inside the node, if one was.

        Raises:
            CorruptPacket: saying which.
        """

    @abc.abstractmethod
    def stop(self, cause: BaseException) -> None:
        """Exchange nothing any more, and let the other ranks know; `drain` says why, ever after."""

    @abc.abstractmethod
    def close(self) -> None:
        """Finish what is under way, and let go of threads and connections."""

    def _disconnect(self) -> None:
        for connection in self.link.connections:
            connection.close()

    def leave(self) -> None:
        """End threads, then connections, when the interpreter exits: no thread may be inside torch after that."""
        self.close()

    def _merge_presence(self, frame: Frame, shard: int) -> None:
        """Answer which parameters have a gradient on any worker."""
        self.link.kernels.any_of(
            frame.received, frame.up_presence, frame.presence_words, frame.answers[shard], frame.down_presence
        )

    @contextmanager
    def abort_on_error(self) -> Iterator[None]:
        """Close the transport if the block raises, as on Ctrl-C: half a step has been sent, and a rank that went on
        would apply what is left of it."""
        try:
            yield
        except BaseException as error:
            self.stop(error)
            raise


def _hang_up(connection: Connection) -> None:
    group = connection.current
    if group is not None:
        hang_up(group)


class LaneTransport(Transport):
    """The buckets of one exchange after another, on three lanes."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        # Three, so that a bucket can be sent while others wait for packets, and others again for answers.
        self._lanes = [Lane(threaded=link.threaded, failure=self._failure) for _ in range(3)]
        self._sending, self._answering, self._collecting = self._lanes
        self._trip: _Trip | None = None
        self._refusal: CorruptPacket | None = None

    def begin(self, channel: Channel, node: AnyNode | None, step: int) -> None:
        """See `Transport`."""
        assert node is None or isinstance(node, Node)
        exchange = channel.exchange(self.link)
        self._trip = _Trip(channel.compressor, channel.buffers, exchange, node, channel.local)
        self.flags_seen = 0
        if channel.buffers.frames:  # else nothing follows that would wait for what is expected here
            self._sending.submit(functools.partial(exchange.listen, step))

    def submit(self, job: Job, presence: Presence, encode_mean: EncodeMean | None, *, gradients: bool) -> None:
        """See `Transport`."""
        assert self._trip is not None, "an exchange begins before its first bucket is complete"
        send = functools.partial(self._send, self._trip, job, presence)
        if self._trip.node is not None:
            assert encode_mean is not None
            node = self._trip.node
            send = functools.partial(self._send_as_node, node, self._trip, job, presence, encode_mean, gradients)
        self._sending.submit(send)

    def _send_as_node(
        self, node: Node, trip: _Trip, job: Job, presence: Presence, encode_mean: EncodeMean, gradients: bool
    ) -> None:
        bucket = job.frame.bucket.index
        if gradients:
            presence.now[bucket] = node.scatter(job, presence.now[bucket])
        job.flags |= encode_means(node, trip.buffers, job, presence.now[bucket] if gradients else 0, encode_mean)
        self._send(trip, job, presence)

    def _send(self, trip: _Trip, job: Job, presence: Presence) -> None:
        with self.link.meter.seal:
            trip.compressor.seal(job.frame)
        trip.buffers.write_presence(job.frame, presence.of(job.frame.bucket.index))
        trip.exchange.send(job)
        self._answering.submit(functools.partial(self._answer, trip, job))

    def _answer(self, trip: _Trip, job: Job) -> None:
        trip.exchange.answer(job, functools.partial(self._merge, trip))
        self._collecting.submit(functools.partial(self._collect, trip, job))

    def _merge(self, trip: _Trip, frame: Frame, shard: int) -> None:
        trip.compressor.merge(frame, shard)
        self._merge_presence(frame, shard)

    def _collect(self, trip: _Trip, job: Job) -> None:
        trip.exchange.collect(job)
        if trip.node is not None:
            trip.node.share(job)
        try:
            self.flags_seen |= trip.exchange.conclude(job)
        except CorruptPacket as refusal:
            # Not raised here, where it would stop the lanes: other ranks count on the packets that are under way.
            self._refusal = self._refusal or refusal
        if job.frame is trip.buffers.frames[-1]:
            self._refusal = trip.exchange.agree(job.step, self._refusal)
            if trip.node is not None:
                self._refusal = trip.node.agree(job.step, self._refusal)

    def drain(self) -> None:
        """See `Transport`."""
        try:
            for lane in self._lanes:
                lane.drain()
        except BaseException as interruption:  # Ctrl-C, or what a handler of another signal raises
            self.stop(interruption)
            raise
        local = self._trip is not None and self._trip.local
        self._trip = None  # whose packets may be large, and not needed again
        if self._refusal is not None and local and self._failure.exception is None:
            self.flags_seen |= packet.REFUSED  # other nodes do not know: the next exchange of this step tells them
            return
        if self._refusal is not None:
            self._failure.note(self._refusal)
        if self._failure.exception is not None:
            for lane in self._lanes:
                lane.close()
        self._failure.check()

    def refuse(self) -> None:
        """See `Transport`."""
        if self._refusal is not None:
            self.stop(self._refusal)
            self._failure.check()

    def stop(self, cause: BaseException) -> None:
        """See `Transport`."""
        self._failure.stop(cause)
        for lane in self._lanes:
            lane.close(_SOON)

    def close(self) -> None:
        """See `Transport`."""
        ended = [lane.close(_SOON) for lane in self._lanes]
        if not all(ended):
            self.stop(RuntimeError("the optimizer was closed in the middle of an exchange"))
        self._disconnect()

    def leave(self) -> None:
        """See `Transport`."""
        ended = [lane.close(_AT_ONCE) for lane in self._lanes]
        if not all(ended):
            self.stop(SystemExit("the interpreter exits"))
        self._disconnect()


_AT_ONCE, _SOON = 0.1, 5.0
"""Seconds that a lane may take to end when it has little to do, and when all its waits fail."""
_open: weakref.WeakSet[Transport] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    for transport in list(_open):
        transport.leave()

"""The way of a bucket on CPUs: three lanes, each of which performs some stages for bucket after bucket.

    sending lane       [mean over the node → encode →] seal → send
    answering lane     receive packets → check → merge → seal → answer
    collecting lane    receive answers → [share in the node →] check → when the caller allows it, commit

There are three lanes so that one bucket can be sent while another waits for packets and a third for answers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

from torch import Tensor

from thinwire.errors import CorruptPacket
from thinwire.kernels.ops import Kernels
from thinwire.kernels.threads import Lent
from thinwire.metrics import Meter
from thinwire.transport import packet
from thinwire.transport.bucket_exchange import BucketExchange
from thinwire.transport.buffers import Frame, PacketBuffers
from thinwire.transport.channel import Channel
from thinwire.transport.commit_round import LaneCommitRound
from thinwire.transport.connections import Connection, Connections
from thinwire.transport.empty import Shortened
from thinwire.transport.lane import Lane
from thinwire.transport.messages import Messages, Pending, complete, waiting_for
from thinwire.transport.node import LaneNode, Node
from thinwire.transport.packet import Header, Packet, refused_by
from thinwire.transport.transport import Transport

_IDLE_SECONDS, _BUSY_SECONDS, _FINISHING_SECONDS = 0.1, 5.0, 30.0
"""How long a lane may take to end when it has nothing left to do, when all its waits fail, and when the interpreter
exits during an exchange that the caller has left: other ranks may want its answer."""


class _Endpoint:
    """The messages of one channel: made once per `PacketBuffers`, used in every exchange.

    It holds no reference to the `PacketBuffers`, so that it goes with them when the channel releases them.
    """

    def __init__(self, channel: Channel, connection: Connection | None, node: Node | None, kernels: Kernels) -> None:
        topology, buffers = channel.topology, channel.buffers
        self.local = channel.local
        self.node = node
        self.worker = topology.node
        self.ranks = topology.slice_ranks()
        self.rank = self.ranks[topology.node]
        self.owners = [topology.owner(shard) for shard in range(channel.layout.workers * channel.layout.slices)]
        self.messages = Messages(connection, topology.node, self.ranks)
        self.commit_round = LaneCommitRound(self.messages, self.ranks, topology.node, buffers, kernels)
        # By bucket: packets, and messages that are not complete.
        self.sent = [[Packet(row) for row in frame.sent] for frame in buffers.frames]
        self.received = [[Packet(row) for row in frame.received] for frame in buffers.frames]
        self.answers = [[Packet(row) for row in frame.answers] for frame in buffers.frames]
        shortens = buffers.leaves_out_zeros and connection is not None
        self.short_sent, self.short_received, self.short_answers = (
            [[Shortened(row, presence) for row in rows] if shortens else [] for rows, presence in of_buckets]
            for of_buckets in (
                [(frame.sent, frame.up_presence) for frame in buffers.frames],
                [(frame.received, frame.up_presence) for frame in buffers.frames],
                [(frame.answers, frame.down_presence) for frame in buffers.frames],
            )
        )
        """The same as messages, on channels that leave out zeros; no entries on others."""
        whole = [(len(self.ranks) - 1) * (frame.sent.shape[1] + frame.answers.shape[1]) for frame in buffers.frames]
        self.bytes_sent, self.bytes_received = list(whole), list(whole)
        """Per bucket, in this exchange."""
        self.packets_due: list[Pending] = [[] for _ in buffers.frames]
        self.answers_due: list[Pending] = [[] for _ in buffers.frames]
        self.packets_sent: list[Pending] = [[] for _ in buffers.frames]
        self.answers_sent: list[Pending] = [[] for _ in buffers.frames]

    def expect_packets(self, frame: Frame) -> None:
        """Post the receives for a bucket's packets."""
        self.packets_due[frame.bucket.index] = self.messages.receive(frame.received, frame.up_tag)

    def packets(self, bucket: BucketExchange, header: Header, kernels: Kernels) -> Sequence[Tensor] | Tensor:
        """What is sent to each owner, given the header with which the packets of a bucket are sealed."""
        index = bucket.index
        if not self.short_sent[index]:
            return bucket.frame.sent
        rows = [packet.message(header, kernels) for packet in self.short_sent[index]]
        self.bytes_sent[index] = sum(row.numel() for to, row in enumerate(rows) if to != self.worker)
        return rows

    def answer(self, bucket: BucketExchange, shard: int, header: Header, kernels: Kernels) -> Tensor:
        """What is sent to all workers, given the header with which the answer is sealed."""
        index = bucket.index
        if not self.short_answers[index]:
            return bucket.frame.answers[shard]
        row = self.short_answers[index][shard].message(header, kernels)
        self.bytes_sent[index] += (len(self.ranks) - 1) * row.numel()
        return row

    def restore_packets(self, bucket: BucketExchange, kernels: Kernels) -> None:
        """Make whole packets of what other workers have sent.

        Raises:
            CorruptPacket: see `Shortened.restore`.
        """
        index = bucket.index
        if self.short_received[index]:
            self.bytes_received[index] = self._restore(self.short_received[index], bucket, kernels)

    def restore_answers(self, bucket: BucketExchange, kernels: Kernels) -> None:
        """Make whole packets of the answers of other owners, for the shards of this rank's slice.

        Raises:
            CorruptPacket: see `Shortened.restore`.
        """
        index, own = bucket.index, bucket.frame.bucket.own_shards
        if self.short_answers[index]:
            arrived = self.short_answers[index][own.start : own.stop]
            self.bytes_received[index] += self._restore(arrived, bucket, kernels)

    def _restore(self, arrived: Sequence[Shortened], bucket: BucketExchange, kernels: Kernels) -> int:
        return sum(
            packet.restore(bucket.header(packet.row[None], rank), kernels)
            for worker, (rank, packet) in enumerate(zip(self.ranks, arrived, strict=True))
            if worker != self.worker
        )


class LaneTransport(Transport):
    """Exchanges buckets on three lanes.

    Args:
        connections: see `Transport`.
        kernels: see `Transport`.
        meter: see `Transport`.
        threaded: whether lanes are threads. Otherwise they run inside `submit`, which then waits for other ranks.
    """

    def __init__(self, connections: Connections, kernels: Kernels, meter: Meter, *, threaded: bool) -> None:
        super().__init__(connections, kernels, meter)
        self._lent = Lent()
        self._lanes = [Lane(threaded=threaded, failure=self._failure, lent=self._lent) for _ in range(3)]
        self._sending, self._answering, self._collecting = self._lanes
        self._endpoints: weakref.WeakKeyDictionary[PacketBuffers, _Endpoint] = weakref.WeakKeyDictionary()
        self._endpoint: _Endpoint | None = None
        """That of the exchange under way."""
        self._to_commit: int | None = None
        """The step of the exchange under way, when all its buckets are submitted."""
        self._left = False
        """Whether the exchange under way ends without the caller."""
        self._refusal: RuntimeError | None = None

    # The way of a bucket ---------------------------------------------------------------------------------------------

    def begin(self, channel: Channel, step: int) -> None:
        """See `Transport`."""
        endpoint = self._endpoints.get(channel.buffers)
        if endpoint is None:
            connection = None if channel.local else self._connections.slice
            endpoint = _Endpoint(channel, connection, self._node_of(channel), self._kernels)
            self._endpoints[channel.buffers] = endpoint
        self._endpoint, self.node = endpoint, endpoint.node
        self.flags_seen = 0
        if channel.buffers.frames:  # otherwise no bucket follows that would wait for these receives
            self._sending.submit(functools.partial(self._post_receives, endpoint, channel.buffers, step))

    def _post_receives(self, endpoint: _Endpoint, buffers: PacketBuffers, step: int) -> None:
        """Post all receives before the first packet is sent: a gloo sender waits for the notice of the receiver."""
        with waiting_for("a connection", step):
            for frame in buffers.frames:
                bucket = frame.bucket.index
                if bucket < buffers.receive_window:
                    endpoint.expect_packets(frame)
                endpoint.answers_due[bucket] = endpoint.messages.receive(frame.own_answers, frame.down_tag)
            endpoint.commit_round.post_receives()

    def submit(self, bucket: BucketExchange) -> None:
        """See `Transport`."""
        assert self._endpoint is not None, "begin() comes before submit()"
        self._sending.submit(functools.partial(self._send, self._endpoint, bucket))
        if bucket.frame is bucket.channel.buffers.frames[-1]:
            self._to_commit = bucket.step

    def _send(self, endpoint: _Endpoint, bucket: BucketExchange) -> None:
        """Sending lane: complete the packets of a bucket and send them to the owners of its shards."""
        frame, index, channel = bucket.frame, bucket.index, bucket.channel
        if endpoint.node is not None:
            self._encode_means(endpoint.node, bucket)
        with self.meter.seal:
            channel.compressor.seal(frame)
            channel.buffers.write_presence(frame, bucket.presence.of(index))
            header = bucket.header(frame.sent, endpoint.rank)
            for to_owner in endpoint.sent[index]:
                header.seal(to_owner, self._kernels)
            packets = endpoint.packets(bucket, header, self._kernels)
        with waiting_for("a connection to send packets", bucket.step, index):
            endpoint.packets_sent[index] = endpoint.messages.send(packets, frame.up_tag)
        self._answering.submit(functools.partial(self._answer, endpoint, bucket))

    def _answer(self, endpoint: _Endpoint, bucket: BucketExchange) -> None:
        """Answering lane: merge the packets of all workers for this rank's shard, and send the answer to all."""
        frame, index, worker, buffers = bucket.frame, bucket.index, endpoint.worker, bucket.channel.buffers
        shard = frame.bucket.own_shards[worker]
        with self.meter.packets, waiting_for("packets", bucket.step, index):
            complete(endpoint.packets_due[index])
        if frame.received is not frame.sent:
            frame.received[worker] = frame.sent[worker]
        with self.meter.merge:
            try:
                endpoint.restore_packets(bucket, self._kernels)
                for sender, received in zip(endpoint.ranks, endpoint.received[index], strict=True):
                    header = bucket.header(frame.received, sender)
                    bucket.add_flags(sender, header.check(received, self._kernels))
                bucket.channel.compressor.merge(frame, shard)
                self._merge_presence(frame, shard)
            except CorruptPacket as error:
                bucket.refuse(error)
            header = bucket.header(frame.answers, endpoint.rank)
            header.seal(endpoint.answers[index][shard], self._kernels)
            answer = endpoint.answer(bucket, shard, header, self._kernels)
        with waiting_for("a connection to send answers", bucket.step, index):
            for next_frame in buffers.frames[index + buffers.receive_window :][:1]:
                endpoint.expect_packets(next_frame)
            endpoint.answers_sent[index] = endpoint.messages.send_to_all(answer, frame.down_tag)
        self._collecting.submit(functools.partial(self._collect, endpoint, bucket))

    def _collect(self, endpoint: _Endpoint, bucket: BucketExchange) -> None:
        """Collecting lane: receive and check all answers of a bucket."""
        index, step = bucket.index, bucket.step
        with self.meter.answers:
            with waiting_for("answers", step, index):
                complete(endpoint.answers_due[index])
            with waiting_for("packets to be taken", step, index):
                complete(endpoint.packets_sent[index])
        try:
            endpoint.restore_answers(bucket, self._kernels)
        except CorruptPacket as refusal:
            self._refusal = self._refusal or refusal
        if endpoint.messages.connected:
            self._count(2, endpoint.bytes_sent[index], endpoint.bytes_received[index])
        if endpoint.node is not None:
            endpoint.node.share(bucket)
        try:
            self.flags_seen |= self._check_answers(endpoint, bucket)
        except CorruptPacket as refusal:
            # Raising it here would stop the lanes, and other ranks need the packets that are under way.
            self._refusal = self._refusal or refusal

    def _check_answers(self, endpoint: _Endpoint, bucket: BucketExchange) -> int:
        """Check the answers for all shards of a bucket.

        Returns:
            The flags that any rank has raised.

        Raises:
            CorruptPacket: this rank or an owner has refused a packet of the bucket.
        """
        if bucket.refusal is not None:
            raise bucket.refusal
        flags = 0
        for owner, answer in zip(endpoint.owners, endpoint.answers[bucket.index], strict=True):
            answered = bucket.header(bucket.frame.answers, owner).check(answer, self._kernels)
            if answered & packet.REFUSED:
                raise refused_by(owner, bucket.step)
            flags |= answered
        return flags

    def _commit(self, endpoint: _Endpoint, step: int, agreed: int) -> None:
        """Collecting lane: the commit rounds between nodes and inside the node, for an error on all ranks if there is
        one on any."""
        if endpoint.messages.connected:
            with self.meter.answers:
                self._refusal = endpoint.commit_round.run(step, self._refusal, agreed)
                # Not before the commit round: see `complete`.
                for index, sent in enumerate(endpoint.answers_sent):
                    with waiting_for("answers to be taken", step, index):
                        complete(sent)
            self._count(1, endpoint.commit_round.bytes_sent, endpoint.commit_round.bytes_sent)
        if endpoint.node is not None:
            self._refusal = endpoint.node.commit(step, self._refusal, agreed)

    # The outcome -----------------------------------------------------------------------------------------------------

    def refuse(self, error: RuntimeError) -> None:
        """See `Transport`."""
        self._refusal = self._refusal or error

    def commit(self) -> None:
        """See `Transport`."""
        if self._endpoint is not None and self._to_commit is not None:
            # The other nodes take no part in a local exchange. All ranks compare `agreed` in their next one.
            agreed = 0 if self._endpoint.local else self.agreed
            commit = functools.partial(self._commit, self._endpoint, self._to_commit, agreed)
            # Behind all buckets, which pass from lane to lane.
            to_collecting = functools.partial(self._collecting.submit, commit)
            self._sending.submit(functools.partial(self._answering.submit, to_collecting))
            self._left = True
        self._to_commit = None

    def wait(self) -> None:
        """See `Transport`."""
        try:
            self.commit()
            with self._lent.while_waiting():
                for lane in self._lanes:
                    lane.drain()
            self._left = False
        except BaseException as interruption:  # Ctrl-C, or an exception from the handler of another signal
            self.abort(interruption)
            raise
        local = self._endpoint is not None and self._endpoint.local
        self._endpoint = None  # its packets may be large, and the channel may be released now
        if self._refusal is not None and local and self._failure.exception is None:
            self.flags_seen |= packet.REFUSED  # see `check_refusal`
            return
        if self._refusal is not None:
            self._failure.record(self._refusal)
        if self._failure.exception is not None:
            for lane in self._lanes:
                lane.close()
        self._failure.check()

    def present(self, channel: Channel) -> list[int]:
        """See `Transport`."""
        return channel.buffers.present()

    def check_refusal(self) -> None:
        """See `Transport`."""
        if self._refusal is not None:
            self.abort(self._refusal)
            self._failure.check()

    def abort(self, cause: BaseException) -> None:
        """See `Transport`."""
        self._failure.stop(cause)
        for lane in self._lanes:
            lane.close(_BUSY_SECONDS)

    def close(self) -> None:
        """See `Transport`."""
        ended = [lane.close(_BUSY_SECONDS) for lane in self._lanes]
        if not all(ended):
            self.abort(RuntimeError("the transport was closed during an exchange"))
        self._connections.close()

    def close_at_exit(self) -> None:
        """See `Transport`."""
        ended = [lane.close(_FINISHING_SECONDS if self._left else _IDLE_SECONDS) for lane in self._lanes]
        if not all(ended):
            self.abort(SystemExit("the interpreter exits"))
        self._connections.close()

    def _make_node(self, channel: Channel, connection: Connection) -> Node:
        return LaneNode(channel, connection, self._kernels, self.meter)

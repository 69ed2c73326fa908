"""The two rounds of an exchange between workers, a bucket at a time, and a word at the end that all of it was right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import CorruptPacket
from thinwire.kernels.ops import Kernels
from thinwire.metrics import Meter
from thinwire.transport import packet
from thinwire.transport.buffers import Frame, PacketBuffers
from thinwire.transport.connections import Connection
from thinwire.transport.layout import Layout
from thinwire.transport.memory import HOST
from thinwire.transport.messages import Messages, Pending, complete, waiting_for
from thinwire.transport.packet import Packet, refused_by
from thinwire.transport.topology import Topology

COPIES = 2
"""Of a last word."""


@dataclass
class Job:
    """One bucket on its way through the lanes; what is learnt of it on the way is added."""

    frame: Frame
    step: int
    flags: int
    """Raised by this rank, and by those it has heard from."""
    refusal: CorruptPacket | None = None
    """The first packet that this rank could not accept. The others wait for what comes next: they get it, and stop."""

    def header(self, packets: Tensor, layout: Layout, sender: int) -> packet.Header:
        """What stands in front of each of these packets of the bucket when `sender` sends it."""
        length = packets.shape[1] - packet.HEADER_BYTES
        return packet.Header(self.step, self.frame.bucket.index, sender, length, layout.fingerprint, self.flags)

    def hear(self, sender: int, flags: int) -> None:
        """Take over the flags that another rank has raised."""
        self.flags |= flags
        if flags & packet.REFUSED:
            self.refuse(refused_by(sender, self.step))

    def refuse(self, error: CorruptPacket) -> None:
        """Note a packet that cannot be accepted."""
        self.refusal = self.refusal or error
        self.flags |= packet.REFUSED


class CommitRound:
    """The last word of an exchange: every member tells all others whether it has refused anything.

    An answer that was changed on its way to one rank is seen by that rank only, and the others would go on. As nobody
    is told of a last word that was changed itself, it is sent twice over, and one of the two is enough.

    Args:
        messages: to whom.
        ranks: of the members.
        own: this one's position among them.
        buffers: the packets that it is about.
        kernels: the backend.
    """

    def __init__(
        self, messages: Messages, ranks: list[int], own: int, buffers: PacketBuffers, kernels: Kernels
    ) -> None:
        self._messages = messages
        self._ranks = ranks
        self._own = own
        self._layout = buffers.layout
        self._kernels = kernels
        self._notes = torch.zeros(len(ranks), COPIES * packet.HEADER_BYTES, dtype=torch.uint8, device=HOST)
        self._packets = [[Packet(copy) for copy in note.view(COPIES, -1)] for note in self._notes]
        self._tag = buffers.commit_tag
        self._due: Pending = []

    @property
    def bytes(self) -> int:
        """How much it sends."""
        return (len(self._ranks) - 1) * self._notes.shape[1] if self._messages.connected else 0

    def listen(self) -> None:
        """Be ready for the others' words."""
        self._due = self._messages.receive(self._notes, self._tag)

    def agree(self, step: int, refusal: CorruptPacket | None) -> CorruptPacket | None:
        """Tell the others of a refusal; this rank's, or what has been heard of one of theirs.

        Raises:
            CorruptPacket: when it is a last word itself that cannot be accepted.
        """
        if not self._messages.connected:
            return refusal
        flags = packet.REFUSED if refusal is not None else 0
        for copy in self._packets[self._own]:
            self._header(step, self._own, flags).seal(copy, self._kernels)
        with waiting_for("the word that all packets were right", step):
            sent = self._messages.send_to_all(self._notes[self._own], self._tag)
            complete(self._due)
            complete(sent)
        for member, rank in enumerate(self._ranks):
            try:
                heard = self._read(step, member)
            except CorruptPacket:
                if refusal is None:
                    raise  # which stops the lanes: the others, who may go on, cannot be told but by silence
                continue
            if heard & packet.REFUSED:
                refusal = refusal or refused_by(rank, step)
        return refusal

    def _read(self, step: int, member: int) -> int:
        first, second = self._packets[member]
        header = self._header(step, member, 0)
        try:
            return header.check(first, self._kernels)
        except CorruptPacket:
            return header.check(second, self._kernels)

    def _header(self, step: int, member: int, flags: int) -> packet.Header:
        end, fingerprint = len(self._layout.buckets), self._layout.fingerprint
        return packet.Header(step, end, self._ranks[member], 0, fingerprint, flags)


class Exchange:
    """Up to the owners of shards, and down again.

    The steps for a bucket follow each other, but may overlap with those for other buckets: `send`, `answer`, `collect`.

    Args:
        buffers: the packets.
        topology: who takes part.
        connection: to the ranks that work on the same slice, which nothing else uses; None for a worker without peers.
        kernels: the backend.
        meter: where bytes and seconds are counted.
    """

    def __init__(
        self, buffers: PacketBuffers, topology: Topology, connection: Connection | None, kernels: Kernels, meter: Meter
    ) -> None:
        self._buffers = buffers
        self._topology = topology
        self._ranks = topology.slice_ranks()
        self._messages = Messages(connection, topology.node, self._ranks)
        self._kernels = kernels
        self._meter = meter
        self._commit_round = CommitRound(self._messages, self._ranks, topology.node, buffers, kernels)
        self._sent = [[Packet(row) for row in frame.sent] for frame in buffers.frames]
        self._received = [[Packet(row) for row in frame.received] for frame in buffers.frames]
        self._answers = [[Packet(row) for row in frame.answers] for frame in buffers.frames]
        self._packets_due: list[Pending] = [[] for _ in buffers.frames]
        self._answers_due: list[Pending] = [[] for _ in buffers.frames]
        self._packets_sent: list[Pending] = [[] for _ in buffers.frames]
        self._answers_sent: list[Pending] = [[] for _ in buffers.frames]

    def listen(self, step: int) -> None:
        """Be ready for everything that is going to come, before packets stand in the way of telling so."""
        with waiting_for("a connection", step):
            for frame in self._buffers.frames:
                bucket = frame.bucket.index
                if bucket == 0 or not self._buffers.one_room:
                    self._expect_packets(frame)
                self._answers_due[bucket] = self._messages.receive(frame.own_answers, frame.down_tag)
            self._commit_round.listen()

    def _expect_packets(self, frame: Frame) -> None:
        self._packets_due[frame.bucket.index] = self._messages.receive(frame.received, frame.up_tag)

    def send(self, job: Job) -> None:
        """Send a bucket's packets to the owners of its shards."""
        frame, bucket, node = job.frame, job.frame.bucket.index, self._topology.node
        header = job.header(frame.sent, self._buffers.layout, self._ranks[node])
        with self._meter.seal:
            for of_owner in self._sent[bucket]:
                header.seal(of_owner, self._kernels)
        with waiting_for("a connection to send packets", job.step, bucket):
            self._packets_sent[bucket] = self._messages.send(frame.sent, frame.up_tag)

    def answer(self, job: Job, merge: Callable[[Frame, int], None]) -> None:
        """When all packets for the own shard are here, answer them with `merge`, and send the answer to everybody."""
        frame, bucket, node = job.frame, job.frame.bucket.index, self._topology.node
        shard = frame.bucket.own_shards[node]
        with self._meter.packets, waiting_for("packets", job.step, bucket):
            complete(self._packets_due[bucket])
        if frame.received is not frame.sent:
            frame.received[node] = frame.sent[node]
        with self._meter.merge:
            try:
                self._check_received(job)
                merge(frame, shard)
            except CorruptPacket as error:
                job.refuse(error)
            header = job.header(frame.answers, self._buffers.layout, self._ranks[node])
            header.seal(self._answers[bucket][shard], self._kernels)
        with waiting_for("a connection to send answers", job.step, bucket):
            if self._buffers.one_room and bucket + 1 < len(self._buffers.frames):
                self._expect_packets(self._buffers.frames[bucket + 1])
            self._answers_sent[bucket] = self._messages.send_to_all(frame.answers[shard], frame.down_tag)

    def collect(self, job: Job) -> None:
        """Wait for the others' answers for this rank's slice, and until its own packets are gone."""
        frame, bucket = job.frame, job.frame.bucket.index
        with self._meter.answers:
            with waiting_for("answers", job.step, bucket):
                complete(self._answers_due[bucket])
            with waiting_for("packets to be taken", job.step, bucket):
                complete(self._packets_sent[bucket])
            with waiting_for("answers to be taken", job.step, bucket):
                complete(self._answers_sent[bucket])
        if self._messages.connected:
            size = (self._topology.workers - 1) * (frame.sent.shape[1] + frame.answers.shape[1])
            self._count(2, size)

    def conclude(self, job: Job) -> int:
        """Look at all answers of a bucket, once they are here.

        Returns:
            The flags that any rank raised.

        Raises:
            CorruptPacket: when this rank, or an owner, got a packet that it cannot accept.
        """
        if job.refusal is not None:
            raise job.refusal
        frame, seen = job.frame, 0
        for shard, answer in enumerate(self._answers[frame.bucket.index]):
            owner = self._topology.owner(shard)
            answered = job.header(frame.answers, self._buffers.layout, owner).check(answer, self._kernels)
            if answered & packet.REFUSED:
                raise refused_by(owner, job.step)
            seen |= answered
        return seen

    def agree(self, step: int, refusal: CorruptPacket | None) -> CorruptPacket | None:
        """When all buckets are here: whether any worker has refused a packet, which then is an error for all."""
        with self._meter.answers:
            refusal = self._commit_round.agree(step, refusal)
        if self._messages.connected:
            self._count(1, self._commit_round.bytes)
        return refusal

    def _count(self, rounds: int, size: int) -> None:
        self._meter.rounds += rounds
        self._meter.bytes_sent += size
        self._meter.bytes_received += size

    def _check_received(self, job: Job) -> None:
        frame = job.frame
        for sender, received in zip(self._ranks, self._received[frame.bucket.index], strict=True):
            job.hear(sender, job.header(frame.received, self._buffers.layout, sender).check(received, self._kernels))

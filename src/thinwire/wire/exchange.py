"""The two rounds of an exchange between workers, a bucket at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from thinwire.metrics import Meter
from thinwire.wire import packet
from thinwire.wire.buckets import Layout
from thinwire.wire.mail import Frame, Mail
from thinwire.wire.messages import Messages, Pending, complete
from thinwire.wire.topology import Topology


@dataclass
class Job:
    """One bucket on its way through the lanes; what is learnt of it on the way is added."""

    frame: Frame
    step: int
    flags: int
    """Raised by this rank, and by those it has heard from."""
    refusal: RuntimeError | None = None
    """The first packet that this rank could not accept. The others wait for what comes next: they get it, and stop."""

    def header(self, packets: Tensor, layout: Layout, sender: int) -> packet.Header:
        """What stands in front of each of these packets of the bucket when `sender` sends it."""
        length = packets.shape[1] - packet.HEADER_BYTES
        return packet.Header(self.step, self.frame.bucket.index, sender, length, layout.fingerprint, self.flags)

    def refuse(self, error: RuntimeError) -> None:
        """Note a packet that cannot be accepted."""
        self.refusal = self.refusal or error
        self.flags |= packet.REFUSED


class Exchange:
    """Up to the owners of shards, and down again.

    The steps for a bucket follow each other, but may overlap with those for other buckets: `send`, `answer`, `collect`.

    Args:
        mail: the packets.
        topology: who takes part.
        group: a process group of the ranks that work on the same slice, which nothing else uses; None for a worker
            without peers.
        meter: where bytes and seconds are counted.
    """

    def __init__(self, mail: Mail, topology: Topology, group: dist.ProcessGroup | None, meter: Meter) -> None:
        self._mail = mail
        self._topology = topology
        self._ranks = topology.slice_ranks()
        self._messages = Messages(group, topology.node, topology.workers)
        self._meter = meter
        self._packets_due: list[Pending] = [[] for _ in mail.frames]
        self._answers_due: list[Pending] = [[] for _ in mail.frames]
        self._packets_sent: list[Pending] = [[] for _ in mail.frames]
        self._answers_sent: list[Pending] = [[] for _ in mail.frames]

    def listen(self) -> None:
        """Be ready for everything that is going to come, before packets stand in the way of telling so."""
        for frame in self._mail.frames:
            bucket = frame.bucket.index
            if bucket == 0 or not self._mail.one_room:
                self._expect_packets(frame)
            self._answers_due[bucket] = self._messages.receive(frame.own_answers, 2 * bucket + 1)

    def _expect_packets(self, frame: Frame) -> None:
        self._packets_due[frame.bucket.index] = self._messages.receive(frame.received, 2 * frame.bucket.index)

    def send(self, job: Job) -> None:
        """Send a bucket's packets to the owners of its shards."""
        frame, bucket, node = job.frame, job.frame.bucket.index, self._topology.node
        header = job.header(frame.sent, self._mail.layout, self._ranks[node])
        for row in range(frame.sent.shape[0]):
            header.write(self._mail.sent_memory, frame.sent_at + row * frame.sent.shape[1])
        self._packets_sent[bucket] = self._messages.send(frame.sent, 2 * bucket)

    def answer(self, job: Job, merge: Callable[[Frame, int], None]) -> None:
        """When all packets for the own shard are here, answer them with `merge`, and send the answer to everybody."""
        frame, bucket, node = job.frame, job.frame.bucket.index, self._topology.node
        shard = frame.bucket.own_shards[node]
        with self._meter.packets:
            complete(self._packets_due[bucket])
        if frame.received is not frame.sent:
            frame.received[node] = frame.sent[node]
        try:
            self._check_received(job)
        except RuntimeError as error:
            job.refuse(error)
        with self._meter.vote:
            merge(frame, shard)
        if self._mail.one_room and bucket + 1 < len(self._mail.frames):
            self._expect_packets(self._mail.frames[bucket + 1])
        at = frame.answers_at + shard * frame.answers.shape[1]
        job.header(frame.answers, self._mail.layout, self._ranks[node]).write(self._mail.answers_memory, at)
        self._answers_sent[bucket] = self._messages.send_to_all(frame.answers[shard], 2 * bucket + 1)

    def collect(self, job: Job) -> None:
        """Wait for the others' answers for this rank's slice, and until its own packets are gone."""
        frame, bucket = job.frame, job.frame.bucket.index
        with self._meter.answers:
            complete(self._answers_due[bucket])
            complete(self._packets_sent[bucket])
            complete(self._answers_sent[bucket])
        if self._messages.connected:
            size = (self._topology.workers - 1) * (frame.sent.shape[1] + frame.answers.shape[1])
            self._meter.rounds += 2
            self._meter.bytes_sent += size
            self._meter.bytes_received += size

    def conclude(self, job: Job) -> int:
        """Look at all answers of a bucket, once they are here.

        Returns:
            The flags that any rank raised.

        Raises:
            RuntimeError: on all ranks, when any rank got a packet that it cannot accept.
        """
        if job.refusal is not None:
            raise job.refusal
        frame, seen = job.frame, 0
        for shard in range(frame.bucket.shards):
            owner = self._topology.owner(shard)
            at = frame.answers_at + shard * frame.answers.shape[1]
            answered = job.header(frame.answers, self._mail.layout, owner).check(self._mail.answers_memory, at)
            if answered & packet.REFUSED:
                raise RuntimeError(
                    f"rank {owner} refused a packet of step {job.step}, bucket {frame.bucket.index}: its own error "
                    "says why"
                )
            seen |= answered
        return seen

    def _check_received(self, job: Job) -> None:
        frame = job.frame
        for row, sender in enumerate(self._ranks):
            header = job.header(frame.received, self._mail.layout, sender)
            job.flags |= header.check(self._mail.received_memory, frame.received_at + row * frame.received.shape[1])

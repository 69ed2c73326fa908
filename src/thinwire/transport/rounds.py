"""The two rounds of an exchange as collectives, for devices: two for each bucket, and a small one at the end.

On NCCL a collective is one more piece of work for a stream, and nobody waits. What packets say is checked where they
are, and told in a status that the device reads; see `thinwire.kernels.header`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire._torch_compat import all_gather, all_to_all
from thinwire.kernels.ops import Kernels
from thinwire.metrics import Meter
from thinwire.transport import packet
from thinwire.transport.buffers import Frame, PacketBuffers
from thinwire.transport.connections import Connection
from thinwire.transport.exchange import COPIES, Job
from thinwire.transport.layout import Layout
from thinwire.transport.messages import Silence, waiting_for
from thinwire.transport.topology import Topology


class Members:
    """Ranks that exchange packets by collectives.

    Args:
        connection: to them, which nothing else uses.
        own: this one's position among them.
        ranks: of the members, as users know them.
        device: where packets are.
    """

    def __init__(self, connection: Connection, own: int, ranks: Sequence[int], device: torch.device) -> None:
        self._connection = connection
        self._ranks = list(ranks)
        self.own = own
        self.rank = self._ranks[own]
        self.senders = torch.tensor(self._ranks, dtype=torch.int64, device=device)

    @property
    def others(self) -> int:
        """How many there are beside this one."""
        return len(self._ranks) - 1

    def scatter(self, rows: Tensor, into: Tensor) -> None:
        """Give every member its row, and get one from each."""
        self._do(lambda: all_to_all(self._connection.group, into.view(-1), rows.view(-1)))

    def gather(self, rows: Tensor) -> None:
        """Give every member the row that is this one's, and get theirs."""
        self._do(lambda: all_gather(self._connection.group, rows.view(-1), rows[self.own]))

    def _do(self, collective: Callable[[], dist.Work | None]) -> None:
        try:
            work = collective()
            assert work is not None, "this rank is a member of the group"
            work.wait()  # on NCCL: the stream waits, not the host
        except RuntimeError as error:
            others = [rank for rank in self._ranks if rank != self.rank]
            raise Silence(others, error) from error


class Rounds:
    """Up to the owners of shards, and down again.

    Args:
        buffers: the packets.
        topology: who takes part.
        connection: to the ranks that work on the same slice, which nothing else uses; None for a worker without peers.
        kernels: the backend.
        meter: where bytes are counted.
        status: where the device keeps what it learns.
    """

    def __init__(
        self,
        buffers: PacketBuffers,
        topology: Topology,
        connection: Connection | None,
        kernels: Kernels,
        meter: Meter,
        status: Tensor,
    ) -> None:
        self._node = topology.node
        self._meter = meter
        device = buffers.layout.device
        ranks = topology.slice_ranks()
        self._rank = ranks[topology.node]
        self._members = None if connection is None else Members(connection, topology.node, ranks, device)
        self._seals = Seals(kernels, buffers.layout, status)
        self._sealed = connection is not None or topology.slices > 1
        owners = [topology.owner(shard) for shard in range(buffers.layout.workers * buffers.layout.slices)]
        self._owners = torch.tensor(owners, dtype=torch.int64, device=device)
        self._word = None if self._members is None else DeviceCommitRound(self._members, self._seals, buffers.layout)

    def exchange(self, job: Job, merge: Callable[[Frame, int], None]) -> None:
        """Send a bucket's packets, answer those for the own shard with `merge`, and get all answers of this slice."""
        frame, members = job.frame, self._members
        shard = frame.bucket.own_shards[self._node]
        self._seal(frame.sent, job)
        if members is not None:
            with waiting_for("packets", job.step, frame.bucket.index):
                members.scatter(frame.sent, frame.received)
            self._seals.check(frame.received, job, members.senders)
        merge(frame, shard)
        self._seal(frame.answers[shard : shard + 1], job)
        if members is not None:
            with waiting_for("answers", job.step, frame.bucket.index):
                members.gather(frame.own_answers)
            self._count(2, members.others * (frame.sent.shape[1] + frame.answers.shape[1]))

    def conclude(self, job: Job) -> None:
        """Look at all answers of a bucket, once they are here."""
        if self._sealed:
            self._seals.check(job.frame.answers, job, self._owners)

    def _seal(self, packets: Tensor, job: Job) -> None:
        if self._sealed:
            self._seals.seal(packets, job, self._rank)

    def agree(self, step: int) -> None:
        """When all buckets are here: let everybody know of a packet that any worker has refused."""
        if self._word is not None:
            self._word.agree(step)
            self._count(1, self._word.bytes)

    def _count(self, rounds: int, size: int) -> None:
        self._meter.rounds += rounds
        self._meter.bytes_sent += size
        self._meter.bytes_received += size


class Seals:
    """Headers of packets on a device.

    Args:
        kernels: the backend.
        layout: the flat space.
        status: where the device keeps what it learns.
    """

    def __init__(self, kernels: Kernels, layout: Layout, status: Tensor) -> None:
        self._kernels = kernels
        self._layout = layout.fingerprint
        self._status = status

    def seal(self, packets: Tensor, job: Job, sender: int) -> None:
        """Put headers in front of packets of a bucket."""
        self.seal_as(packets, job.step, job.frame.bucket.index, job.flags, sender)

    def seal_as(self, packets: Tensor, step: int, bucket: int, flags: int, sender: int) -> None:
        """The same, told in detail."""
        self._kernels.packet_seal(
            packets, self._status, step=step, bucket=bucket, sender=sender, flags=flags, layout=self._layout
        )

    def check(self, packets: Tensor, job: Job, senders: Tensor) -> None:
        """Look at the headers of packets of a bucket."""
        self.check_as(packets, job.step, job.frame.bucket.index, job.flags, senders)

    def check_as(
        self, packets: Tensor, step: int, bucket: int, flags: int, senders: Tensor, *, copies: int = 1
    ) -> None:
        """The same, told in detail."""
        self._kernels.packet_check(
            packets, senders, self._status, step=step, bucket=bucket, flags=flags, layout=self._layout, copies=copies
        )


class DeviceCommitRound:
    """The last word of an exchange, as `thinwire.transport.exchange.CommitRound` has it.

    Args:
        members: whom to tell.
        seals: of its packets.
        layout: the flat space.
    """

    def __init__(self, members: Members, seals: Seals, layout: Layout) -> None:
        self._members = members
        self._seals = seals
        self._end = len(layout.buckets)
        shape = (members.others + 1, COPIES * packet.HEADER_BYTES)
        self._notes = torch.zeros(shape, dtype=torch.uint8, device=layout.device)

    @property
    def bytes(self) -> int:
        """How much it sends."""
        return self._members.others * self._notes.shape[1]

    def agree(self, step: int) -> None:
        """Tell all members what has been raised, and hear of theirs."""
        own, members = self._notes[self._members.own], self._members
        self._seals.seal_as(own.view(COPIES, -1), step, self._end, 0, members.rank)
        with waiting_for("the word that all packets were right", step):
            members.gather(self._notes)
        self._seals.check_as(self._notes, step, self._end, 0, members.senders, copies=COPIES)

"""The fast link inside a node, for devices: as `thinwire.transport.node` has it, by collectives on a stream."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.header import ABSENT, REFUSED, Status
from thinwire.kernels.ops import Kernels
from thinwire.metrics import Meter
from thinwire.transport.buffers import PacketBuffers, fill_words
from thinwire.transport.connections import Connection
from thinwire.transport.exchange import Job
from thinwire.transport.messages import waiting_for
from thinwire.transport.node import Staging
from thinwire.transport.packet import HEADER_BYTES
from thinwire.transport.rounds import DeviceCommitRound, Members, Seals
from thinwire.transport.topology import Topology


class DeviceNode(Staging):
    """The ranks of a node. All of them must have gradients for the same parameters: which these are decides what the
    host asks for, and what others have it does not know.

    Args:
        buffers: the packets.
        topology: who is in the node.
        connection: to them, which nothing else uses.
        dtype: in which gradients cross the link, float32 or bfloat16.
        kernels: the backend.
        meter: where bytes are counted.
        status: where the device keeps what it learns.
    """

    def __init__(
        self,
        buffers: PacketBuffers,
        topology: Topology,
        connection: Connection,
        dtype: torch.dtype,
        kernels: Kernels,
        meter: Meter,
        status: Tensor,
    ) -> None:
        super().__init__(buffers, topology, dtype, kernels)
        self._meter = meter
        self._status = status
        self._members = Members(connection, self._own, self._ranks, self._layout.device)
        self._seals = Seals(kernels, self._layout, status)
        self._word = DeviceCommitRound(self._members, self._seals, self._layout)

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """All that is used on the side stream."""
        return self._staged, self._received, self._mean

    def scatter(self, job: Job, presence: int) -> None:
        """Give every rank of the node its slice of a bucket."""
        bucket = job.frame.bucket.index
        rows = self._rows[bucket]
        at = slice(HEADER_BYTES, HEADER_BYTES + rows.presence_bytes)
        words, received = rows.staged[:, at].view(torch.int64), rows.received[:, at].view(torch.int64)
        fill_words(words, presence)
        self._seals.seal(rows.staged, job, self._members.rank)
        with waiting_for("gradients of the node", job.step, bucket):
            self._members.scatter(rows.staged, rows.received)
        self._seals.check(rows.received, job, self._members.senders)
        self._refuse_where((received != words).any(), job.step, bucket)

    def _refuse_where(self, differs: Tensor, step: int, bucket: int) -> None:
        """Refuse everything from now on if, as the device knows, ranks have gradients for other parameters."""
        first = differs & (self._status[Status.CODE] == 0)
        for field, value in ((Status.CODE, ABSENT), (Status.STEP, step), (Status.BUCKET, bucket)):
            self._status[field].copy_(torch.where(first, value, self._status[field]))
        self._status[Status.FLAGS].bitwise_or_(differs * REFUSED)

    def share(self, job: Job) -> None:
        """Give all ranks of the node the answers for this rank's slice, and get theirs."""
        blocks = job.frame.answers.view(len(self._ranks), -1)
        bucket = job.frame.bucket.index
        with waiting_for("answers of the node", job.step, bucket):
            self._members.gather(blocks)
        self._meter.node_bytes_sent += self._members.others * (self._rows[bucket].staged.shape[1] + blocks.shape[1])

    def agree(self, step: int) -> None:
        """When all buckets are here: let the node know of a packet that any rank has refused."""
        self._word.agree(step)
        self._meter.node_bytes_sent += self._word.bytes

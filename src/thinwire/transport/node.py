"""The fast link inside a node: gradients are averaged over its ranks, and answers shared among them.

A gradient is staged, at full precision or in bfloat16, as soon as backward has it. When a bucket is complete a lane
scatters its slices over the ranks of the node, and each averages its own, always in the order of ranks, so that the
result does not depend on the backend. After the exchange between nodes the ranks give each other their slices' answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import CorruptPacket
from thinwire.kernels.modes import Scale
from thinwire.kernels.ops import Kernels
from thinwire.metrics import Meter
from thinwire.transport import packet
from thinwire.transport.buffers import WORD_BYTES, Frame, PacketBuffers
from thinwire.transport.connections import Connection
from thinwire.transport.exchange import CommitRound, Job
from thinwire.transport.layout import Bucket, Slot
from thinwire.transport.memory import memory_of
from thinwire.transport.messages import Messages, complete, waiting_for
from thinwire.transport.packet import Packet
from thinwire.transport.topology import Topology

_ALIGNMENT = 64


@dataclass(frozen=True)
class Rows:
    """Where one bucket's gradients lie: a row for each rank of the node, with a header, presence bits and a slice."""

    staged: Tensor
    at: int
    received: Tensor
    values: Tensor
    """The slices in `staged`."""
    received_values: Tensor
    presence_bytes: int


class Staging:
    """Gradients on their way into a node, and their mean.

    Args:
        buffers: the packets.
        topology: who is in the node.
        dtype: in which gradients cross the link, float32 or bfloat16.
        kernels: the backend.
    """

    def __init__(self, buffers: PacketBuffers, topology: Topology, dtype: torch.dtype, kernels: Kernels) -> None:
        self._layout = buffers.layout
        self._ranks = topology.node_ranks()
        self._own = topology.own_slice
        self._kernels = kernels
        n, device = len(self._ranks), buffers.layout.device
        sizes = [_row_bytes(frame, dtype.itemsize) for frame in buffers.frames]
        self._staged = torch.zeros(n * sum(sizes), dtype=torch.uint8, device=device)
        # One bucket at a time is averaged, so all of them are received in the same place.
        self._received = torch.zeros(n * max(sizes, default=0), dtype=torch.uint8, device=device)
        longest = max((frame.bucket.slice_elements for frame in buffers.frames), default=0)
        self._mean = torch.zeros(longest, dtype=torch.float32, device=device)
        self._rows: list[Rows] = []
        at = 0
        for frame, size in zip(buffers.frames, sizes, strict=True):
            staged = self._staged[at : at + n * size].view(n, size)
            received = self._received[: n * size].view(n, size)
            first = size - dtype.itemsize * frame.bucket.slice_elements
            values, received_values = staged[:, first:].view(dtype), received[:, first:].view(dtype)
            self._rows.append(
                Rows(staged, at, received, values, received_values, presence_bytes=WORD_BYTES * frame.presence_words)
            )
            at += n * size

    def stage(self, position: int, bucket: Bucket, grad: Tensor | None, scale: Scale) -> None:
        """Take in a part of a parameter's gradient times `scale`; zeros for none."""
        slot = self._layout.slots[position]
        values = self._rows[bucket.index].values
        for row, (start, stop) in enumerate(_overlaps(slot, bucket)):
            if start < stop:
                first = bucket.start + row * bucket.slice_elements
                to = values[row, start - first : stop - first]
                if grad is None:
                    to.zero_()
                else:
                    flat = grad.detach().as_strided((grad.numel(),), (1,))  # it has a graph after create_graph=True
                    here = flat[start - slot.start : stop - slot.start]
                    # Multiplied in float32 and rounded once, whatever crosses the link.
                    unscaled = not isinstance(scale, Tensor) and scale == 1.0
                    to.copy_(here if unscaled else here.float() * scale)

    def mean(self, job: Job, runs: Tensor) -> Tensor:
        """The node's mean gradient of this rank's slice, computed for the elements of some consecutive runs."""
        values = self._rows[job.frame.bucket.index].received_values
        start, stop = int(runs[0, 1]), int(runs[-1, 1] + runs[-1, 2])
        self._kernels.mean(values[:, start:stop], self._mean[start:stop])
        return self._mean


class Node(Staging):
    """The ranks of a node, on the lanes of a CPU.

    Args:
        buffers: the packets.
        topology: who is in the node.
        connection: to them, which nothing else uses.
        dtype: in which gradients cross the link, float32 or bfloat16.
        kernels: the backend.
        meter: where bytes and seconds are counted.
    """

    def __init__(
        self,
        buffers: PacketBuffers,
        topology: Topology,
        connection: Connection,
        dtype: torch.dtype,
        kernels: Kernels,
        meter: Meter,
    ) -> None:
        super().__init__(buffers, topology, dtype, kernels)
        self._messages = Messages(connection, self._own, self._ranks)
        self._commit_round = CommitRound(self._messages, self._ranks, self._own, buffers, kernels)
        self._meter = meter
        self._staged_memory = memory_of(self._staged)
        self._received_memory = memory_of(self._received)
        self._packets = [[Packet(row) for row in rows.staged] for rows in self._rows]
        self._received_packets = [[Packet(row) for row in rows.received] for rows in self._rows]

    def scatter(self, job: Job, presence: int) -> int:
        """Give every rank of the node its slice of a bucket; the presence bits of all of them together."""
        rows = self._rows[job.frame.bucket.index]
        header = job.header(rows.staged, self._layout, self._ranks[self._own])
        size = rows.staged.shape[1]
        data = presence.to_bytes(rows.presence_bytes, "little")
        for row in range(len(self._ranks)):
            at = rows.at + row * size + packet.HEADER_BYTES
            self._staged_memory[at : at + len(data)] = data
            header.seal(self._packets[job.frame.bucket.index][row], self._kernels)
        bucket = job.frame.bucket.index
        tag = job.frame.up_tag
        with self._meter.scatter, waiting_for("gradients of the node", job.step, bucket):
            due = self._messages.receive(rows.received, tag)
            sent = self._messages.send(rows.staged, tag)
            rows.received[self._own] = rows.staged[self._own]
            complete(due)
            complete(sent)
        for row, sender in enumerate(self._ranks):
            try:
                header = job.header(rows.received, self._layout, sender)
                job.hear(sender, header.check(self._received_packets[bucket][row], self._kernels))
            except CorruptPacket as error:
                job.refuse(error)
            at = row * size + packet.HEADER_BYTES
            presence |= int.from_bytes(self._received_memory[at : at + len(data)], "little")
        return presence

    def share(self, job: Job) -> None:
        """Give all ranks of the node the answers for this rank's slice, and get theirs."""
        blocks = job.frame.answers.view(len(self._ranks), -1)
        bucket = job.frame.bucket.index
        tag = job.frame.down_tag
        with self._meter.share, waiting_for("answers of the node", job.step, bucket):
            due = self._messages.receive(blocks, tag)
            sent = self._messages.send_to_all(blocks[self._own], tag)
            complete(due)
            complete(sent)
        rows = self._rows[bucket]
        self._meter.node_bytes_sent += (len(self._ranks) - 1) * (rows.staged.shape[1] + blocks.shape[1])

    def agree(self, step: int, refusal: CorruptPacket | None) -> CorruptPacket | None:
        """When all buckets are here: whether any rank of the node knows of a packet that was refused."""
        with self._meter.share:
            with waiting_for("a connection inside the node", step):
                self._commit_round.listen()
            refusal = self._commit_round.agree(step, refusal)
        self._meter.node_bytes_sent += self._commit_round.bytes
        return refusal


def _row_bytes(frame: Frame, itemsize: int) -> int:
    head = packet.HEADER_BYTES + WORD_BYTES * frame.presence_words
    # Rows whose slices begin at the start of a cache line: copies into them are no slower than elsewhere.
    return -(-head // _ALIGNMENT) * _ALIGNMENT + itemsize * frame.bucket.slice_elements


def _overlaps(slot: Slot, bucket: Bucket) -> list[tuple[int, int]]:
    """For each slice of a bucket, the elements of the flat space that it shares with a parameter."""
    firsts = range(bucket.start, bucket.stop, bucket.slice_elements)
    return [(max(first, slot.start), min(first + bucket.slice_elements, slot.start + slot.numel)) for first in firsts]

"""The fast link inside a node: its ranks average their gradients and share the answers of their slices.

A gradient is staged, in float32 or bfloat16, as soon as backward has computed it. When a bucket is complete, its slices
are scattered over the ranks of the node, and each rank averages its own, always in the order of ranks, so that the
result does not depend on the backend. After the exchange between nodes the ranks send each other their slices' answers.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import CorruptPacket
from thinwire.kernels.header import ABSENT, Status
from thinwire.kernels.modes import Scale
from thinwire.kernels.ops import Kernels
from thinwire.metrics import Meter
from thinwire.transport.bucket_exchange import BucketExchange
from thinwire.transport.buffers import WORD_BYTES, Frame, fill_words
from thinwire.transport.channel import Channel
from thinwire.transport.collectives import Collectives
from thinwire.transport.commit_round import LaneCommitRound, StreamCommitRound
from thinwire.transport.connections import Connection
from thinwire.transport.layout import Bucket, Slot
from thinwire.transport.memory import memory_of
from thinwire.transport.messages import Messages, Pending, complete, waiting_for
from thinwire.transport.packet import HEADER_BYTES, REFUSED, DeviceHeaders, Packet

_ALIGNMENT = 64


@dataclass(frozen=True)
class _Rows:
    """Where the gradients of one bucket lie. Each rank of the node has a row: header, presence bits, slice."""

    staged: Tensor
    staged_at: int
    """The byte at which `staged` begins, in the memory of all buckets."""
    received: Tensor
    staged_values: Tensor
    """The slices in `staged`."""
    received_values: Tensor
    presence_bytes: int


class Node(abc.ABC):
    """The ranks of this rank's node, and the memory in which gradients are staged for them.

    Args:
        channel: gives the layout, the topology and the dtype; other channels of the same layout use the node too.
        kernels: the backend.
        meter: counts bytes and seconds.
    """

    def __init__(self, channel: Channel, kernels: Kernels, meter: Meter) -> None:
        layout, frames, dtype = channel.layout, channel.buffers.frames, channel.node_dtype
        self._slots = layout.slots
        self._ranks = channel.topology.node_ranks()
        self._own = channel.topology.own_slice
        self._kernels = kernels
        self._meter = meter
        n, device = len(self._ranks), layout.device
        sizes = [_row_bytes(frame, dtype.itemsize) for frame in frames]
        self._staged = torch.zeros(n * sum(sizes), dtype=torch.uint8, device=device)
        # Buckets are averaged one at a time, so all of them are received in the same memory.
        self._received = torch.zeros(n * max(sizes, default=0), dtype=torch.uint8, device=device)
        longest = max((frame.bucket.slice_elements for frame in frames), default=0)
        self._mean = torch.zeros(longest, dtype=torch.float32, device=device)
        self._rows: list[_Rows] = []
        at = 0
        for frame, size in zip(frames, sizes, strict=True):
            staged = self._staged[at : at + n * size].view(n, size)
            received = self._received[: n * size].view(n, size)
            first = size - dtype.itemsize * frame.bucket.slice_elements
            values, received_values = staged[:, first:].view(dtype), received[:, first:].view(dtype)
            self._rows.append(
                _Rows(staged, at, received, values, received_values, presence_bytes=WORD_BYTES * frame.presence_words)
            )
            at += n * size

    def stage(self, position: int, bucket: Bucket, grad: Tensor | None, scale: Scale) -> None:
        """Copy the part of a parameter's gradient that lies in a bucket, times `scale`; zeros if it is None."""
        slot = self._slots[position]
        values = self._rows[bucket.index].staged_values
        for row, (start, stop) in enumerate(_overlaps(slot, bucket)):
            if start < stop:
                first = bucket.start + row * bucket.slice_elements
                to = values[row, start - first : stop - first]
                if grad is None:
                    to.zero_()
                else:
                    flat = grad.detach().as_strided((grad.numel(),), (1,))  # has a graph after create_graph=True
                    here = flat[start - slot.start : stop - slot.start]
                    # Multiply in float32 and round once, also for bfloat16.
                    unscaled = not isinstance(scale, Tensor) and scale == 1.0
                    to.copy_(here if unscaled else here.float() * scale)

    @abc.abstractmethod
    def scatter(self, bucket: BucketExchange) -> None:
        """Send every rank of the node its slice of a bucket, with the presence bits of this rank."""

    def mean(self, bucket: BucketExchange, runs: Tensor) -> Tensor:
        """The node's mean gradient of this rank's slice, computed for the elements of some consecutive runs."""
        values = self._rows[bucket.index].received_values
        start, stop = int(runs[0, 1]), int(runs[-1, 1] + runs[-1, 2])
        self._kernels.mean(values[:, start:stop], self._mean[start:stop])
        return self._mean

    @abc.abstractmethod
    def share(self, bucket: BucketExchange) -> None:
        """Send the answers of this rank's slice to the other ranks of the node, and receive theirs."""

    @abc.abstractmethod
    def commit(self, step: int, refusal: RuntimeError | None, agreed: int) -> RuntimeError | None:
        """The commit round of the node, when all buckets are complete; see `CommitRound.run`."""


class LaneNode(Node):
    """The node on CPUs. Its methods run on lanes, except `stage`.

    The ranks may have gradients for different parameters: `scatter` adds their presence bits to those of the bucket.

    Args:
        channel: see `Node`.
        connection: to the ranks of the node, used by nothing else.
        kernels: the backend.
        meter: counts bytes and seconds.
    """

    def __init__(self, channel: Channel, connection: Connection, kernels: Kernels, meter: Meter) -> None:
        super().__init__(channel, kernels, meter)
        self._messages = Messages(connection, self._own, self._ranks)
        self._commit_round = LaneCommitRound(self._messages, self._ranks, self._own, channel.buffers, kernels)
        self._sent: list[Pending] = []
        """Of this exchange. All members have taken them when they commit; see `complete`."""
        self._staged_memory = memory_of(self._staged)
        self._received_memory = memory_of(self._received)
        self._staged_packets = [[Packet(row) for row in rows.staged] for rows in self._rows]
        self._received_packets = [[Packet(row) for row in rows.received] for rows in self._rows]

    def scatter(self, bucket: BucketExchange) -> None:
        """See `Node`."""
        index, tag = bucket.index, bucket.frame.up_tag
        rows, presence = self._rows[index], bucket.presence.now[index]
        header = bucket.header(rows.staged, self._ranks[self._own])
        size = rows.staged.shape[1]
        data = presence.to_bytes(rows.presence_bytes, "little")
        for row in range(len(self._ranks)):
            at = rows.staged_at + row * size + HEADER_BYTES
            self._staged_memory[at : at + len(data)] = data
            header.seal(self._staged_packets[index][row], self._kernels)
        with self._meter.scatter, waiting_for("gradients of the node", bucket.step, index):
            due = self._messages.receive(rows.received, tag)
            self._sent.append(self._messages.send(rows.staged, tag))
            rows.received[self._own] = rows.staged[self._own]
            complete(due)
        for row, sender in enumerate(self._ranks):
            try:
                header = bucket.header(rows.received, sender)
                bucket.add_flags(sender, header.check(self._received_packets[index][row], self._kernels))
            except CorruptPacket as error:
                bucket.refuse(error)
            at = row * size + HEADER_BYTES
            presence |= int.from_bytes(self._received_memory[at : at + len(data)], "little")
        bucket.presence.now[index] = presence

    def share(self, bucket: BucketExchange) -> None:
        """See `Node`."""
        index, tag = bucket.index, bucket.frame.down_tag
        blocks = bucket.frame.answers.view(len(self._ranks), -1)
        with self._meter.share, waiting_for("answers of the node", bucket.step, index):
            due = self._messages.receive(blocks, tag)
            self._sent.append(self._messages.send_to_all(blocks[self._own], tag))
            complete(due)
        size = self._rows[index].staged.shape[1] + blocks.shape[1]
        self._meter.node_bytes_sent += (len(self._ranks) - 1) * size

    def commit(self, step: int, refusal: RuntimeError | None, agreed: int) -> RuntimeError | None:
        """See `Node`."""
        with self._meter.share:
            with waiting_for("a connection inside the node", step):
                self._commit_round.post_receives()
            refusal = self._commit_round.run(step, refusal, agreed)
            with waiting_for("gradients and answers to be taken in the node", step):
                for sent in self._sent:
                    complete(sent)
                self._sent.clear()
        self._meter.node_bytes_sent += self._commit_round.bytes_sent
        return refusal


class StreamNode(Node):
    """The node on a device. Its methods enqueue work on the side stream, except `stage`.

    All ranks must have gradients for the same parameters: the host enqueues one encode per parameter with a gradient,
    and does not know which gradients the other ranks have.

    Args:
        channel: see `Node`.
        connection: to the ranks of the node, used by nothing else.
        kernels: the backend.
        meter: counts bytes.
        status: the status words of the device.
    """

    def __init__(
        self, channel: Channel, connection: Connection, kernels: Kernels, meter: Meter, status: Tensor
    ) -> None:
        super().__init__(channel, kernels, meter)
        self._status = status
        self._collectives = Collectives(connection, self._own, self._ranks, channel.layout.device)
        self._headers = DeviceHeaders(kernels, channel.layout.fingerprint, status)
        self._commit_round = StreamCommitRound(self._collectives, self._headers, channel.layout)

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """All tensors that the side stream uses."""
        return self._staged, self._received, self._mean

    def scatter(self, bucket: BucketExchange) -> None:
        """See `Node`."""
        index, step, collectives = bucket.index, bucket.step, self._collectives
        rows = self._rows[index]
        at = slice(HEADER_BYTES, HEADER_BYTES + rows.presence_bytes)
        words, received = rows.staged[:, at].view(torch.int64), rows.received[:, at].view(torch.int64)
        fill_words(words, bucket.presence.now[index])
        self._headers.seal(rows.staged, step, index, bucket.flags, collectives.rank)
        with waiting_for("gradients of the node", step, index):
            collectives.scatter(rows.staged, rows.received)
        self._headers.check(rows.received, step, index, bucket.flags, collectives.senders)
        self._refuse_if((received != words).any(), step, index)

    def _refuse_if(self, differs: Tensor, step: int, bucket: int) -> None:
        """Refuse the exchange if, as the device finds, ranks have gradients for different parameters."""
        first = differs & (self._status[Status.CODE] == 0)
        for field, value in ((Status.CODE, ABSENT), (Status.STEP, step), (Status.BUCKET, bucket)):
            self._status[field].copy_(torch.where(first, value, self._status[field]))
        self._status[Status.FLAGS].bitwise_or_(differs * REFUSED)

    def share(self, bucket: BucketExchange) -> None:
        """See `Node`."""
        blocks = bucket.frame.answers.view(len(self._ranks), -1)
        with waiting_for("answers of the node", bucket.step, bucket.index):
            self._collectives.gather(blocks)
        size = self._rows[bucket.index].staged.shape[1] + blocks.shape[1]
        self._meter.node_bytes_sent += self._collectives.others * size

    def commit(self, step: int, refusal: RuntimeError | None, agreed: int) -> RuntimeError | None:
        """See `Node`."""
        refusal = self._commit_round.run(step, refusal, agreed)
        self._meter.node_bytes_sent += self._commit_round.bytes_sent
        return refusal


def _row_bytes(frame: Frame, itemsize: int) -> int:
    head = HEADER_BYTES + WORD_BYTES * frame.presence_words
    # Align slices to cache lines: copies into unaligned rows are slower.
    return -(-head // _ALIGNMENT) * _ALIGNMENT + itemsize * frame.bucket.slice_elements


def _overlaps(slot: Slot, bucket: Bucket) -> list[tuple[int, int]]:
    """For each slice of a bucket, the elements of the flat space that it shares with a parameter."""
    firsts = range(bucket.start, bucket.stop, bucket.slice_elements)
    return [(max(first, slot.start), min(first + bucket.slice_elements, slot.start + slot.numel)) for first in firsts]

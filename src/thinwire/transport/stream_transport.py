"""The way of a bucket on a device: `StreamTransport.submit` enqueues all stages on a side stream, and the device runs
them while backward continues.

    [mean over the node → encode →] seal → send → check → merge → seal → answer → [share in the node →] check
    → when the caller waits for it, commit → report

The outcome of an exchange is in a `Report` on the device, which kernels read. The host reads a copy of it: at once with
`wait`, or during a later step with `join` and `outcomes`.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from thinwire._torch_compat import group_timeout
from thinwire.errors import CorruptPacket, PeerLost
from thinwire.kernels.ops import Kernels
from thinwire.metrics import Meter
from thinwire.transport.bucket_exchange import BucketExchange
from thinwire.transport.buffers import PacketBuffers
from thinwire.transport.channel import Channel
from thinwire.transport.collectives import Collectives
from thinwire.transport.commit_round import StreamCommitRound
from thinwire.transport.connections import Connection, Connections
from thinwire.transport.layout import Layout
from thinwire.transport.messages import waiting_for
from thinwire.transport.node import Node, StreamNode
from thinwire.transport.packet import DeviceHeaders
from thinwire.transport.report import Outcome, Report
from thinwire.transport.streams import Event, Streams, streams_of, wait_for
from thinwire.transport.transport import Transport


class SideStream:
    """The side stream of a device, and the report of the exchanges on it. It outlives the connections of a run.

    Args:
        streams: the streams of the device.
        layout: the flat space.
    """

    def __init__(self, streams: Streams, layout: Layout) -> None:
        self.streams = streams
        self.report = Report(layout)
        self.deferred = False
        """Set by a caller that leaves the outcome of the last exchange to the device and reads it later."""

    @classmethod
    def of(cls, layout: Layout) -> SideStream | None:
        """The side stream of the device of a layout; None for a CPU, which has lanes instead."""
        streams = streams_of(layout.device)
        return None if streams is None else cls(streams, layout)

    def bind(self, kernels: Kernels) -> Kernels:
        """Kernels that write what they find to the report, and read from it whether to apply an update."""
        return kernels.on_device(self.report.status, self.report.gate)


class _Endpoint:
    """The collectives of one channel: made once per `PacketBuffers`, used in every exchange.

    It holds no reference to the `PacketBuffers`, so that it goes with them when the channel releases them.
    """

    def __init__(
        self, channel: Channel, connection: Connection | None, node: Node | None, kernels: Kernels, status: Tensor
    ) -> None:
        topology, layout = channel.topology, channel.layout
        ranks = topology.slice_ranks()
        self.local = channel.local
        self.node = node
        self.worker = topology.node
        self.rank = ranks[topology.node]
        self.headers = DeviceHeaders(kernels, layout.fingerprint, status)
        self.checks = connection is not None or topology.slices > 1
        """Whether packets get headers. A single rank reads its own packets."""
        owners = [topology.owner(shard) for shard in range(layout.workers * layout.slices)]
        self.owners = torch.tensor(owners, dtype=torch.int64, device=layout.device)
        self.collectives: Collectives | None = None
        self.commit_round: StreamCommitRound | None = None
        if connection is not None:
            self.collectives = Collectives(connection, topology.node, ranks, layout.device)
            self.commit_round = StreamCommitRound(self.collectives, self.headers, layout)


@dataclass(frozen=True)
class _Reported:
    """A report that is being copied to the host."""

    step: int
    slot: Tensor
    copied: Event


class StreamTransport(Transport):
    """Exchanges buckets on a side stream.

    Args:
        connections: see `Transport`.
        kernels: see `Transport`.
        meter: see `Transport`.
        side: the side stream of the device.
    """

    def __init__(self, connections: Connections, kernels: Kernels, meter: Meter, side: SideStream) -> None:
        super().__init__(connections, kernels, meter)
        self._timeout = group_timeout(connections.all[0].group) if connections.all else None
        self._side = side
        self._endpoints: weakref.WeakKeyDictionary[PacketBuffers, _Endpoint] = weakref.WeakKeyDictionary()
        self._endpoint: _Endpoint | None = None
        """That of the exchange under way."""
        self._present: list[int] = []
        self._reported: deque[_Reported] = deque()
        self._to_commit: int | None = None
        """The step of the exchange under way, when all its buckets are submitted."""
        self._refusal: RuntimeError | None = None
        # If the transport is dropped during an exchange, its memory is not reused before the exchange is done.
        at_end = weakref.finalize(self, side.streams.join)
        at_end.atexit = False

    # The way of a bucket ---------------------------------------------------------------------------------------------

    def begin(self, channel: Channel, step: int) -> None:
        """See `Transport`."""
        self._failure.check()
        endpoint = self._endpoints.get(channel.buffers)
        if endpoint is None:
            connection, status = None if channel.local else self._connections.slice, self._side.report.status
            endpoint = _Endpoint(channel, connection, self._node_of(channel), self._kernels, status)
            self._endpoints[channel.buffers] = endpoint
            for memory in channel.buffers.memory:
                self._side.streams.share(memory)
        self._endpoint, self.node = endpoint, endpoint.node
        self._side.report.begin()

    def submit(self, bucket: BucketExchange) -> None:
        """See `Transport`."""
        assert self._endpoint is not None, "begin() comes before submit()"
        with self._side.streams.aside():
            self._exchange(self._endpoint, bucket)
        if bucket.frame is bucket.channel.buffers.frames[-1]:
            self._to_commit = bucket.step

    def _exchange(self, endpoint: _Endpoint, bucket: BucketExchange) -> None:
        """Enqueue all stages of a bucket up to the check of its answers."""
        frame, index, step = bucket.frame, bucket.index, bucket.step
        compressor, buffers = bucket.channel.compressor, bucket.channel.buffers
        headers, collectives, node = endpoint.headers, endpoint.collectives, endpoint.node
        shard = frame.bucket.own_shards[endpoint.worker]
        answer = frame.answers[shard : shard + 1]
        if node is not None:
            self._encode_means(node, bucket)
        flags = bucket.flags
        compressor.seal(frame)
        buffers.fill_presence(frame, bucket.presence.of(index))
        if endpoint.checks:
            headers.seal(frame.sent, step, index, flags, endpoint.rank)
        if collectives is not None:
            with waiting_for("packets", step, index):
                collectives.scatter(frame.sent, frame.received)
            headers.check(frame.received, step, index, flags, collectives.senders)
        try:
            compressor.merge(frame, shard)
        except CorruptPacket as refusal:
            # Other ranks wait for the answer: they get one, with the flag REFUSED.
            self._refusal = self._refusal or refusal
            self._side.report.set_refused()
        self._merge_presence(frame, shard)
        if endpoint.checks:
            headers.seal(answer, step, index, flags, endpoint.rank)
        if collectives is not None:
            with waiting_for("answers", step, index):
                collectives.gather(frame.own_answers)
            size = collectives.others * (frame.sent.shape[1] + frame.answers.shape[1])
            self._count(2, size, size)
        if node is not None:
            node.share(bucket)
        if endpoint.checks:
            headers.check(frame.answers, step, index, flags, endpoint.owners)
        self._side.report.copy_presence(frame)

    def commit(self) -> None:
        """See `Transport`. Enqueue the commit rounds between nodes and inside the node, and the copy of the report."""
        endpoint, step = self._endpoint, self._to_commit
        self._to_commit = None
        if endpoint is None or step is None:
            return
        with self._side.streams.aside():
            agreed = 0 if endpoint.local else self.agreed
            if endpoint.commit_round is not None:
                endpoint.commit_round.run(step, self._refusal, agreed)
                self._count(1, endpoint.commit_round.bytes_sent, endpoint.commit_round.bytes_sent)
            if endpoint.node is not None:
                endpoint.node.commit(step, self._refusal, agreed)
            slot = self._side.report.copy_to_host()
            self._reported.append(_Reported(step, slot, self._side.streams.record_event()))

    # The outcome -----------------------------------------------------------------------------------------------------

    def refuse(self, error: RuntimeError) -> None:
        """See `Transport`."""
        self._refusal = self._refusal or error
        with self._side.streams.aside():
            self._side.report.set_refused()

    def join(self) -> None:
        """Commit, and make the current stream wait for the exchange, but not the host. Gates on the device then decide
        which parameters move; `outcomes` has the result later."""
        self._failure.check()
        self.commit()
        self._side.streams.join()
        self._side.report.set_gates()

    def wait(self) -> None:
        """See `Transport`. The host waits for the device."""
        self._failure.check()
        self.commit()
        self._side.streams.join()
        self._side.report.open_gates()
        self.flags_seen = 0
        for _, outcome in self.outcomes():
            self.flags_seen, self._present = outcome.flags, outcome.present
        self._endpoint = None

    def outcomes(self, before: float = math.inf) -> Iterator[tuple[int, Outcome]]:
        """The steps whose outcomes have not been read yet, with their outcomes.

        Args:
            before: the first step to leave out, because it is under way.

        Raises:
            PeerLost: the device does not complete an exchange within the timeout.
            CorruptPacket: on all ranks, when one of them received a packet that it could not accept.
        """
        while self._reported and self._reported[0].step < before:
            reported = self._reported.popleft()
            seconds = None if self._timeout is None else self._timeout.total_seconds()
            if not wait_for(reported.copied, seconds):
                self._abort_with(PeerLost("an exchange on the device", "it does not end", step=reported.step))
            outcome = self._side.report.read(reported.slot)
            refusal = self._refusal or outcome.refusal
            if refusal is not None:
                self._abort_with(refusal)
            yield reported.step, outcome

    def _abort_with(self, cause: RuntimeError) -> NoReturn:
        self.abort(cause)
        raise cause

    def present(self, channel: Channel) -> list[int]:
        """See `Transport`."""
        return self._present

    def check_refusal(self) -> None:
        """See `Transport`. On a device `wait` and `outcomes` raise for local exchanges too."""
        self._failure.check()

    def abort(self, cause: BaseException) -> None:
        """See `Transport`."""
        self._failure.stop(cause)

    def close(self) -> None:
        """See `Transport`."""
        self._side.streams.join()
        self._connections.close()

    def _make_node(self, channel: Channel, connection: Connection) -> Node:
        node = StreamNode(channel, connection, self._kernels, self.meter, self._side.report.status)
        for memory in node.memory:
            self._side.streams.share(memory)
        return node

"""What becomes of a bucket on a device: the host says once in which order, and the device does it on a side stream.

    encode → round 1 → vote → round 2 → ready

How an exchange went is in a report, which kernels read on the device. The host reads it as well: at once if it has
something to decide, or else during the next step, when it has long been there.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from thinwire._torch_compat import group_timeout
from thinwire.errors import CorruptPacket, PeerLost
from thinwire.kernels.ops import Kernels
from thinwire.transport.buffers import Frame, PacketBuffers
from thinwire.transport.compressor import Compressor
from thinwire.transport.device_node import DeviceNode
from thinwire.transport.exchange import Job
from thinwire.transport.lanes import AnyNode, Channel, EncodeMean, Link, Presence, Transport, encode_means
from thinwire.transport.layout import Layout
from thinwire.transport.report import Findings, Report
from thinwire.transport.rounds import Rounds
from thinwire.transport.streams import Mark, Streams, streams_of, wait_for


class Side:
    """The side of a device on which exchanges are made.

    Args:
        streams: in which order.
        layout: of what.
    """

    def __init__(self, streams: Streams, layout: Layout) -> None:
        self.streams = streams
        self.report = Report(layout)
        self.unseen = False
        """Whether the step under way is left to the device, and all that it depends on."""

    @classmethod
    def of(cls, layout: Layout) -> Side | None:
        """That of the device of a layout; None for a CPU, which has lanes instead."""
        streams = streams_of(layout.device)
        return None if streams is None else cls(streams, layout)

    def bind(self, kernels: Kernels) -> Kernels:
        """Kernels that tell the report what they find, and ask it whether to step."""
        return kernels.on_device(self.report.status, self.report.gate)


@dataclass(frozen=True)
class _Trip:
    """What the buckets of one exchange need on their way."""

    compressor: Compressor
    buffers: PacketBuffers
    rounds: Rounds
    node: DeviceNode | None


@dataclass(frozen=True)
class _Reported:
    """A report that is on its way to the host."""

    step: int
    slot: Tensor
    mark: Mark


class StreamTransport(Transport):
    """The buckets of one exchange after another, on a side stream.

    Args:
        link: whom this rank is joined to.
        side: of its device.
    """

    def __init__(self, link: Link, side: Side) -> None:
        super().__init__(link)
        self._timeout = group_timeout(link.connections[0].group) if link.connections else None
        self._side = side
        self._trip: _Trip | None = None
        self.present: list[int] = []
        """The positions of the parameters that have a gradient on some worker, in the last exchange that was waited
        for."""
        self._reported: deque[_Reported] = deque()
        self._refusal: CorruptPacket | None = None
        # Whatever becomes of an optimizer in the midst of a step, its memory is not used again before that is done.
        farewell = weakref.finalize(self, side.streams.join)
        farewell.atexit = False

    def begin(self, channel: Channel, node: AnyNode | None, step: int) -> None:
        """See `Transport`."""
        self._failure.check()
        rounds = channel.rounds(self.link, self._side.report.status)
        assert node is None or isinstance(node, DeviceNode)
        if self._trip is None or self._trip.buffers is not channel.buffers:
            for memory in (*channel.buffers.memory, *(() if node is None else node.memory)):
                self._side.streams.share(memory)
        self._trip = _Trip(channel.compressor, channel.buffers, rounds, node)
        self._side.report.begin()

    def submit(self, job: Job, presence: Presence, encode_mean: EncodeMean | None, *, gradients: bool) -> None:
        """See `Transport`."""
        trip, side = self._trip, self._side
        assert trip is not None, "an exchange begins before its first bucket is complete"
        last = job.frame is trip.buffers.frames[-1]
        with side.streams.aside():
            if trip.node is not None:
                assert encode_mean is not None
                present = presence.now[job.frame.bucket.index] if gradients else 0
                if gradients:
                    trip.node.scatter(job, present)
                encode_means(trip.node, trip.buffers, job, present, encode_mean)  # flags are the device's
            trip.compressor.seal(job.frame)
            trip.buffers.fill_presence(job.frame, presence.of(job.frame.bucket.index))
            trip.rounds.exchange(job, functools.partial(self._merge, trip))
            if trip.node is not None:
                trip.node.share(job)
            trip.rounds.conclude(job)
            side.report.note_presence(job.frame)
            if last:
                trip.rounds.agree(job.step)
                if trip.node is not None:
                    trip.node.agree(job.step)
                slot = side.report.send()
                self._reported.append(_Reported(job.step, slot, side.streams.mark()))

    def _merge(self, trip: _Trip, frame: Frame, shard: int) -> None:
        try:
            trip.compressor.merge(frame, shard)
        except CorruptPacket as refusal:
            # The others wait for what comes next: they get it, and in it that it is the end.
            self._refusal = self._refusal or refusal
            self._side.report.refuse()
        self._merge_presence(frame, shard)

    def join(self) -> None:
        """Let the current stream go on when the exchange is done, with the gates as the report says."""
        self._failure.check()
        self._side.streams.join()
        self._side.report.decide()

    def drain(self) -> None:
        """See `Transport`; waits for the device."""
        self._failure.check()
        self._side.streams.join()
        self._side.report.allow()
        self.flags_seen = 0
        for _, findings in self.outcomes():
            self.flags_seen, self.present = findings.flags, findings.present
        self._trip = None

    def outcomes(self, before: float = math.inf) -> Iterator[tuple[int, Findings]]:
        """What has been reported of which step since this was asked last.

        Args:
            before: a step, which is under way, and not asked about.

        Raises:
            PeerLost: when a device does not get to the end of an exchange.
            CorruptPacket: on all ranks, when one of them got a packet that it could not accept.
        """
        while self._reported and self._reported[0].step < before:
            reported = self._reported.popleft()
            seconds = None if self._timeout is None else self._timeout.total_seconds()
            if not wait_for(reported.mark, seconds):
                self._give_up(PeerLost("an exchange on the device", "it does not end", step=reported.step))
            findings = self._side.report.read(reported.slot)
            refusal = self._refusal or findings.refusal
            if refusal is not None:
                self._give_up(refusal)
            yield reported.step, findings

    def _give_up(self, cause: PeerLost | CorruptPacket) -> NoReturn:
        self.stop(cause)
        raise cause

    def refuse(self) -> None:
        """See `Transport`."""
        self._failure.check()

    def stop(self, cause: BaseException) -> None:
        """See `Transport`."""
        self._failure.stop(cause)

    def close(self) -> None:
        """See `Transport`."""
        self._side.streams.join()
        self._disconnect()

"""The commit round: the last message of an exchange. Every rank reports to all others whether it accepted all packets.

An answer that is damaged on its way to one rank is noticed by that rank only, and the others would apply it. The commit
round stops them. No later message could report damage to the commit round itself, so its packet is sent in two copies,
of which one is enough.

It takes place when the caller waits for the exchange, and not as soon as the last answer has arrived. So it can also
carry what is known only then: whether the caller refuses the step, and a hash of what must be equal on all ranks, which
is the learning rates and other numbers of parameter groups. The hash is added to that of the layout, which all packets
before have compared.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch

from thinwire.errors import CorruptPacket
from thinwire.kernels.ops import Kernels
from thinwire.transport import packet
from thinwire.transport.buffers import PacketBuffers
from thinwire.transport.collectives import Collectives
from thinwire.transport.layout import Layout
from thinwire.transport.memory import HOST
from thinwire.transport.messages import Messages, Pending, complete, waiting_for
from thinwire.transport.packet import DeviceHeaders, Disagreement, Packet, refused_by

STAGE = "the commit round"
_COPIES = 2


class CommitRound(abc.ABC):
    """One row per member: two copies of a packet that is only a header.

    Args:
        layout: the flat space.
        members: the number of members.
        device: the device of the rows.
    """

    def __init__(self, layout: Layout, members: int, device: torch.device) -> None:
        self._rows = torch.zeros(members, _COPIES * packet.HEADER_BYTES, dtype=torch.uint8, device=device)
        self._bucket = len(layout.buckets)
        """Stands in the headers: the number after that of the last bucket."""
        self.bytes_sent = (members - 1) * self._rows.shape[1]
        """The bytes that each round sends."""

    @abc.abstractmethod
    def run(self, step: int, refusal: RuntimeError | None, agreed: int) -> RuntimeError | None:
        """Exchange the outcome of a step with all members.

        Args:
            step: the step.
            refusal: why this rank does not commit: the first packet that it has refused, as far as the host knows.
            agreed: 32 bits that must be equal on all members.

        Returns:
            The refusal, or that of another member, as far as the host knows.
        """


class LaneCommitRound(CommitRound):
    """The commit round on CPUs, by messages.

    Args:
        messages: to the members.
        ranks: the members.
        own: this rank's position among them.
        buffers: the packets of the exchange.
        kernels: the backend.
    """

    def __init__(
        self, messages: Messages, ranks: Sequence[int], own: int, buffers: PacketBuffers, kernels: Kernels
    ) -> None:
        super().__init__(buffers.layout, len(ranks), HOST)
        self._messages = messages
        self._ranks = ranks
        self._own = own
        self._fingerprint = buffers.layout.fingerprint
        self._kernels = kernels
        self._packets = [[Packet(copy) for copy in row.view(_COPIES, -1)] for row in self._rows]
        self._tag = buffers.commit_tag
        self._due: Pending = []
        self._sent: Pending = []
        """Complete when the other members take part in the next exchange; see `complete`."""

    def post_receives(self) -> None:
        """Post the receives for the packets of the other members."""
        self._due = self._messages.receive(self._rows, self._tag)

    def run(self, step: int, refusal: RuntimeError | None, agreed: int) -> RuntimeError | None:
        """See `CommitRound`.

        Raises:
            CorruptPacket: both copies of a member's packet are damaged.
        """
        with waiting_for(STAGE, step):
            complete(self._sent)
        flags = packet.REFUSED if refusal is not None else 0
        if isinstance(refusal, Disagreement):
            flags |= packet.DISAGREE
        for copy in self._packets[self._own]:
            self._header(step, self._own, flags, agreed).seal(copy, self._kernels)
        with waiting_for(STAGE, step):
            self._sent = self._messages.send_to_all(self._rows[self._own], self._tag)
            complete(self._due)
        for member, rank in enumerate(self._ranks):
            try:
                received = self._check(step, member, agreed)
            except CorruptPacket as error:
                if error.field == "layout":
                    received = packet.REFUSED | packet.DISAGREE
                elif refusal is None:
                    raise  # and stop the lanes: other ranks notice when the connections close
                else:
                    continue
            if received & packet.DISAGREE and not isinstance(refusal, Disagreement):
                # Whatever else has happened: all ranks must know of it, because they compare the numbers together.
                earlier, refusal = refusal, Disagreement(rank, step)
                refusal.earlier = earlier
            elif received & packet.REFUSED:
                refusal = refusal or refused_by(rank, step)
        return refusal

    def _check(self, step: int, member: int, agreed: int) -> int:
        first, second = self._packets[member]
        header = self._header(step, member, 0, agreed)
        try:
            return header.check(first, self._kernels)
        except CorruptPacket:
            return header.check(second, self._kernels)

    def _header(self, step: int, member: int, flags: int, agreed: int) -> packet.Header:
        return packet.Header(step, self._bucket, self._ranks[member], 0, self._fingerprint ^ agreed, flags)


class StreamCommitRound(CommitRound):
    """The commit round on a device, by a collective.

    Args:
        collectives: with the members.
        headers: seal and check packets on the device.
        layout: the flat space.
    """

    def __init__(self, collectives: Collectives, headers: DeviceHeaders, layout: Layout) -> None:
        super().__init__(layout, collectives.others + 1, layout.device)
        self._collectives = collectives
        self._headers = headers

    def run(self, step: int, refusal: RuntimeError | None, agreed: int) -> RuntimeError | None:
        """See `CommitRound`. The device reads and raises flags in its status, and the host learns of them later: the
        result is `refusal` as it is."""
        own, collectives = self._rows[self._collectives.own], self._collectives
        self._headers.seal(own.view(_COPIES, -1), step, self._bucket, 0, collectives.rank, agreed=agreed)
        with waiting_for(STAGE, step):
            collectives.gather(self._rows)
        self._headers.check(self._rows, step, self._bucket, 0, collectives.senders, copies=_COPIES, agreed=agreed)
        return refusal

"""The header of every packet: how it is written, checked and reported.

Without the checks, packets of another version, step or model would be averaged in silently. So would bits that a
network card, a cable or memory has changed: TCP's own checksum misses one such error in 65,536.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.errors import CorruptPacket
from thinwire.kernels import header
from thinwire.kernels.header import ABSENT, CHECKED, CHECKSUM, REFUSED_BY_PEER, Status
from thinwire.kernels.header import ACTIVATION as ACTIVATION
from thinwire.kernels.header import DISAGREE as DISAGREE
from thinwire.kernels.header import EMPTY as EMPTY
from thinwire.kernels.header import HEADER_BYTES as HEADER_BYTES
from thinwire.kernels.header import NONFINITE as NONFINITE
from thinwire.kernels.header import REFUSED as REFUSED
from thinwire.kernels.header import SYNCHRONIZE as SYNCHRONIZE
from thinwire.kernels.ops import Kernels
from thinwire.transport.memory import memory_of

_HINTS = {
    "checksum": ": the packet was changed on its way. Look for a faulty cable, network card or memory",
    "version": ": all ranks must run the same version of thinwire",
    "step": ": all ranks must call step() equally often and load checkpoints of the same step",
    "synchronize": ": all ranks must call synchronize() after the same step",
    "layout": ": all ranks must have the same parameters in the same order",
}


class Packet:
    """A row of memory that is sent or received as one message; made once, used in every step."""

    __slots__ = ("body", "memory")

    def __init__(self, row: Tensor) -> None:
        self.memory = memory_of(row)
        self.body = row[CHECKSUM.size :]
        """What the checksum covers."""


@dataclass(frozen=True)
class Header:
    """The fields of a header that differ between packets. A CRC-32C of the rest of the packet precedes them."""

    step: int
    bucket: int
    sender: int
    length: int
    layout: int
    flags: int

    def seal(self, packet: Packet, kernels: Kernels) -> None:
        """Write the header and the checksum of a packet."""
        header.write(packet.memory, **vars(self))
        CHECKSUM.pack_into(packet.memory, 0, kernels.crc32c(packet.body))

    def check(self, packet: Packet, kernels: Kernels) -> int:
        """Compare the header of a received packet with this one, except NONFINITE and REFUSED.

        Returns:
            The flags of the packet.

        Raises:
            CorruptPacket: naming the first field that differs.
        """
        code, got, want, flags = header.compare(packet.memory, kernels.crc32c(packet.body), **vars(self))
        if code:
            raise _unexpected(self.sender, self.step, self.bucket, CHECKED[code - 1], got, want)
        return flags


class DeviceHeaders:
    """Writes and checks headers on a device, as `Header` does on the host. Flags and errors go to the status words.

    Args:
        kernels: the backend.
        layout: the fingerprint of the layout.
        status: the status words of the device.
    """

    def __init__(self, kernels: Kernels, layout: int, status: Tensor) -> None:
        self._kernels = kernels
        self._layout = layout
        self._status = status

    def seal(self, packets: Tensor, step: int, bucket: int, flags: int, sender: int, *, agreed: int = 0) -> None:
        """Write the headers of packets, one per row."""
        layout = self._layout ^ agreed
        self._kernels.packet_seal(
            packets, self._status, step=step, bucket=bucket, sender=sender, flags=flags, layout=layout
        )

    def check(
        self,
        packets: Tensor,
        step: int,
        bucket: int,
        flags: int,
        senders: Tensor,
        *,
        copies: int = 1,
        agreed: int = 0,
    ) -> None:
        """Check the headers of packets, one row per sender, of which each has so many copies."""
        layout = self._layout ^ agreed
        self._kernels.packet_check(
            packets, senders, self._status, step=step, bucket=bucket, flags=flags, layout=layout, copies=copies
        )


class Disagreement(CorruptPacket):
    """Ranks take a step with different numbers in their parameter groups. On CPUs all ranks raise it in that step.

    Ranks that do not take the same step have different hashes too. `earlier` is what this rank has refused before.

    Args:
        rank: one whose numbers are not those of this rank, or which knows of such ranks.
        step: the step.
    """

    earlier: RuntimeError | None = None

    def __init__(self, rank: int, step: int) -> None:
        super().__init__(
            f"rank {rank} took step {step} with a learning rate, or another number of a parameter group, that differs "
            "between ranks: they must be the same on all ranks in every step. Give all ranks the same schedule"
        )
        self.rank, self.step = rank, step

    def __reduce__(self) -> tuple[type[Disagreement], tuple[int, int]]:
        return type(self), (self.rank, self.step)


def _unexpected(sender: int, step: int, bucket: int, name: str, got: int, want: int) -> CorruptPacket:
    error = CorruptPacket(
        f"packet from rank {sender} for step {step}, bucket {bucket}: {name} is {got}, expected "
        f"{want}{_HINTS.get(name, '')}"
    )
    error.field = name
    return error


def refused_by(rank: int, step: int) -> CorruptPacket:
    """The error for a packet that another rank could not accept."""
    return CorruptPacket(f"rank {rank} refused a packet of step {step}: see the error of that rank for the reason")


def refusal_in(status: Sequence[int], commit: int) -> CorruptPacket | None:
    """The error that the status words of a device describe, if any. `commit` is the bucket of commit messages."""
    code = status[Status.CODE]
    if not code:
        return None
    sender, step, bucket = status[Status.SENDER], status[Status.STEP], status[Status.BUCKET]
    if code == REFUSED_BY_PEER:
        return refused_by(sender, step)
    if code == ABSENT:
        return CorruptPacket(
            f"ranks of this node have gradients for different parameters in step {step}, bucket {bucket}. On a GPU all "
            "ranks of a node must have gradients for the same parameters: use topology='flat'"
        )
    if bucket == commit and CHECKED[code - 1] == "layout":
        return Disagreement(sender, step)
    return _unexpected(sender, step, bucket, CHECKED[code - 1], status[Status.GOT], status[Status.WANT])

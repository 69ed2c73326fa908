"""The header in front of every packet, and what is wrong when it is not the one that was expected.

A worker that runs another version, is a step ahead or has another model would otherwise be averaged in silently, and so
would bits that a network card, a cable or a memory has changed: TCP's own checksum misses one such error in 65,536.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.errors import CorruptPacket
from thinwire.kernels import header
from thinwire.kernels.header import ABSENT, CHECKED, CHECKSUM, REFUSED_BY_PEER, Status
from thinwire.kernels.header import ACTIVATION as ACTIVATION
from thinwire.kernels.header import HEADER_BYTES as HEADER_BYTES
from thinwire.kernels.header import NONFINITE as NONFINITE
from thinwire.kernels.header import REFUSED as REFUSED
from thinwire.kernels.header import SYNCHRONIZE as SYNCHRONIZE
from thinwire.kernels.ops import Kernels
from thinwire.transport.memory import memory_of

_HINTS = {
    "checksum": ": it is not as it was sent. Look for a faulty cable, network card or memory",
    "version": ": all ranks must run the same version of thinwire",
    "step": ": all ranks must call step() equally often and load checkpoints of the same step",
    "synchronize": ": all ranks must call synchronize() after the same step",
    "layout": ": all ranks must give the optimizer the same parameters in the same order",
}


class Packet:
    """A row of memory that is sent or received as one message; made once, used at every step."""

    __slots__ = ("body", "memory")

    def __init__(self, row: Tensor) -> None:
        self.memory = memory_of(row)
        self.body = row[CHECKSUM.size :]
        """All that the checksum in front of it is about."""


@dataclass(frozen=True)
class Header:
    """What a packet says about itself. In front of it stands the CRC-32C of everything else in the packet."""

    step: int
    bucket: int
    sender: int
    length: int
    layout: int
    flags: int

    def seal(self, packet: Packet, kernels: Kernels) -> None:
        """Put the header and the checksum in front of a packet."""
        header.write(packet.memory, **vars(self))
        CHECKSUM.pack_into(packet.memory, 0, kernels.crc32c(packet.body))

    def check(self, packet: Packet, kernels: Kernels) -> int:
        """The flags of a received packet, whose header must be this one but for NONFINITE and REFUSED.

        Raises:
            CorruptPacket: naming the first field that differs.
        """
        code, got, want, flags = header.compare(packet.memory, kernels.crc32c(packet.body), **vars(self))
        if code:
            raise _unexpected(self.sender, self.step, self.bucket, CHECKED[code - 1], got, want)
        return flags


def _unexpected(sender: int, step: int, bucket: int, name: str, got: int, want: int) -> CorruptPacket:
    return CorruptPacket(
        f"packet from rank {sender} for step {step}, bucket {bucket}: {name} is {got}, expected "
        f"{want}{_HINTS.get(name, '')}"
    )


def refused_by(rank: int, step: int) -> CorruptPacket:
    """What to say of a packet that another rank could not accept."""
    return CorruptPacket(f"rank {rank} refused a packet of step {step}: its own error says why")


def refusal_in(status: Sequence[int]) -> CorruptPacket | None:
    """What a device has refused, if anything, told from the words of its status."""
    code = status[Status.CODE]
    if not code:
        return None
    sender, step, bucket = status[Status.SENDER], status[Status.STEP], status[Status.BUCKET]
    if code == REFUSED_BY_PEER:
        return refused_by(sender, step)
    if code == ABSENT:
        return CorruptPacket(
            f"ranks of this node have gradients for different parameters in step {step}, bucket {bucket}. On a GPU all "
            "ranks of a node must have them for the same ones: use topology='flat'"
        )
    return _unexpected(sender, step, bucket, CHECKED[code - 1], status[Status.GOT], status[Status.WANT])

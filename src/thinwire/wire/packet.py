"""The header in front of every packet, and what is wrong when it is not the one that was expected.

A worker that runs another version, is a step ahead or has another model would otherwise be averaged in silently, and so
would bits that a network card, a cable or a memory has changed: TCP's own checksum misses one such error in 65,536.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from torch import Tensor

from thinwire.errors import CorruptPacket
from thinwire.kernels.ops import Kernels
from thinwire.wire.memory import memory_of

MAGIC = 0x5754  # "TW" in memory
VERSION = 2
_CHECKSUM = struct.Struct("<I")
_REST = struct.Struct("<HHHHQIII")
HEADER_BYTES = _CHECKSUM.size + _REST.size

NONFINITE = 1
"""A gradient of the sender was not finite: nobody takes this step."""
REFUSED = 2
"""The sender got a packet that it could not accept: everybody stops."""
GREETING = 4
"""The bits say which coordinates live, not which way they vote."""
SYNCHRONIZE = 8
"""An exchange by itself, outside of any step."""

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
        self.body = row[_CHECKSUM.size :]
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
        fields = (MAGIC, VERSION, self.flags, self.sender, self.step, self.bucket, self.length, self.layout)
        _REST.pack_into(packet.memory, _CHECKSUM.size, *fields)
        _CHECKSUM.pack_into(packet.memory, 0, kernels.crc32c(packet.body))

    def check(self, packet: Packet, kernels: Kernels) -> int:
        """The flags of a received packet, whose header must be this one but for NONFINITE and REFUSED.

        Raises:
            CorruptPacket: naming the first field that differs.
        """
        (checksum,) = _CHECKSUM.unpack_from(packet.memory)
        magic, version, flags, *fields = _REST.unpack_from(packet.memory, _CHECKSUM.size)
        # The checksum first, because the rest means nothing without it. What kind of an exchange it is last: whoever
        # differs in the step may differ in that for the same reason.
        names = ("checksum", "magic", "version", "sender", "step", "bucket", "length", "layout")
        received = (checksum, magic, version, *fields, flags & GREETING, flags & SYNCHRONIZE)
        own = (self.sender, self.step, self.bucket, self.length, self.layout)
        due = (kernels.crc32c(packet.body), MAGIC, VERSION, *own)
        wanted = (*due, self.flags & GREETING, self.flags & SYNCHRONIZE)
        for name, got, want in zip((*names, "greeting", "synchronize"), received, wanted, strict=True):
            if got != want:
                raise CorruptPacket(
                    f"packet from rank {self.sender} for step {self.step}, bucket {self.bucket}: "
                    f"{name} is {got}, expected {want}{_HINTS.get(name, '')}"
                )
        return flags

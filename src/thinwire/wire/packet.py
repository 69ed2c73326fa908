"""The header in front of every packet, and what is wrong when it is not the one that was expected.

A worker that runs another version, is a step ahead or has another model would otherwise be averaged in silently.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAGIC = 0x52495754  # "TWIR" in memory
VERSION = 1
_HEADER = struct.Struct("<IHHQIIII")
HEADER_BYTES = _HEADER.size

NONFINITE = 1
"""A gradient of the sender was not finite: nobody takes this step."""
REFUSED = 2
"""The sender got a packet that it could not accept: everybody stops."""
GREETING = 4
"""The bits say which coordinates live, not which way they vote."""
SYNCHRONIZE = 8
"""An exchange by itself, outside of any step."""

_HINTS = {
    "version": ": all ranks must run the same version of thinwire",
    "step": ": all ranks must call step() equally often and load checkpoints of the same step",
    "synchronize": ": all ranks must call synchronize() after the same step",
    "layout": ": all ranks must give the optimizer the same parameters in the same order",
}


@dataclass(frozen=True)
class Header:
    """What a packet says about itself."""

    step: int
    bucket: int
    sender: int
    length: int
    layout: int
    flags: int

    def write(self, memory: memoryview, at: int) -> None:
        """Put the header at byte `at`."""
        _HEADER.pack_into(
            memory, at, MAGIC, VERSION, self.flags, self.step, self.bucket, self.sender, self.length, self.layout
        )

    def check(self, memory: memoryview, at: int) -> int:
        """The flags of a received packet, whose header at byte `at` must be this one but for NONFINITE and REFUSED.

        Raises:
            RuntimeError: naming the first field that differs.
        """
        magic, version, flags, *fields = _HEADER.unpack_from(memory, at)
        # What kind of an exchange it is last: whoever differs in the step may differ in that for the same reason.
        names = ("magic", "version", "step", "bucket", "sender", "length", "layout", "greeting", "synchronize")
        kind, own_kind = ((of & GREETING, of & SYNCHRONIZE) for of in (flags, self.flags))
        received = (magic, version, *fields, *kind)
        wanted = (MAGIC, VERSION, self.step, self.bucket, self.sender, self.length, self.layout, *own_kind)
        for name, got, want in zip(names, received, wanted, strict=True):
            if got != want:
                raise RuntimeError(
                    f"packet from rank {self.sender} for step {self.step}, bucket {self.bucket}: "
                    f"{name} is {got}, expected {want}{_HINTS.get(name, '')}"
                )
        return flags

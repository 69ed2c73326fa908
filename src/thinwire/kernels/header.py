"""The header of a packet: its fields, their places, and the codes by which a device reports what is wrong with one.

`FIELD_BYTES` is the one table of fields. Offsets, struct formats and the Triton kernels follow from it.
"""

from __future__ import annotations

import enum
import struct
from typing import Any

MAGIC = 0x5754  # "TW" in memory
VERSION = 4

FIELD_BYTES = {
    "checksum": 4,
    "magic": 2,
    "version": 2,
    "flags": 2,
    "sender": 2,
    "step": 8,
    "bucket": 4,
    "length": 4,
    "layout": 4,
}
"""The fields in their order, unsigned and little-endian; the checksum is the CRC-32C of everything after it."""
FIELD_OFFSETS = {name: sum(list(FIELD_BYTES.values())[:index]) for index, name in enumerate(FIELD_BYTES)}
HEADER_BYTES = sum(FIELD_BYTES.values())

_LETTERS = {2: "H", 4: "I", 8: "Q"}
_FORMAT = "".join(_LETTERS[size] for size in FIELD_BYTES.values())
CHECKSUM = struct.Struct("<" + _FORMAT[0])
_FLAGS = struct.Struct("<" + _LETTERS[FIELD_BYTES["flags"]])
_AFTER_CHECKSUM = struct.Struct("<" + _FORMAT[1:])

NONFINITE = 1
"""A gradient of the sender was not finite: no rank takes this step."""
REFUSED = 2
"""The sender received a packet that it could not accept: all ranks stop."""
ACTIVATION = 4
"""The payload has activation bits, not votes."""
SYNCHRONIZE = 8
"""An exchange by itself, outside of any step."""
DISAGREE = 16
"""In a commit message: the sender knows of ranks whose parameter groups have different numbers."""
EMPTY = 32
"""The message ends with the presence bits, which follow the header: the payload is all zeros."""
RAISED = NONFINITE | REFUSED
"""Flags that a receiver takes from a packet. It knows the others in advance."""

CHECKED = ("checksum", "magic", "version", "sender", "step", "bucket", "length", "layout", "activation", "synchronize")
"""What is compared, in this order. The checksum comes first: without it the other fields mean nothing. The kind of the
exchange comes last: ranks at different steps often differ in it too, and the step is the cause."""
CODES = {name: code for code, name in enumerate(CHECKED, start=1)}


def write(memory: Any, *, flags: int, sender: int, step: int, bucket: int, length: int, layout: int) -> None:
    """Write all fields but the checksum into a writable buffer."""
    _AFTER_CHECKSUM.pack_into(memory, CHECKSUM.size, MAGIC, VERSION, flags, sender, step, bucket, length, layout)


def compare(
    memory: Any, checksum: int, *, flags: int, sender: int, step: int, bucket: int, length: int, layout: int
) -> tuple[int, int, int, int]:
    """Compare the header in a buffer with the expected one.

    Returns:
        The code of the first field of `CHECKED` that differs, its value and the expected value, zeros if none does; and
        the flags of the packet.
    """
    (claimed,) = CHECKSUM.unpack_from(memory)
    magic, version, seen, *fields = _AFTER_CHECKSUM.unpack_from(memory, CHECKSUM.size)
    received = (claimed, magic, version, *fields, seen & ACTIVATION, seen & SYNCHRONIZE)
    expected = (
        checksum, MAGIC, VERSION, sender, step, bucket, length, layout, flags & ACTIVATION, flags & SYNCHRONIZE
    )  # fmt: skip
    if received == expected:
        return 0, 0, 0, seen
    for code, (got, want) in enumerate(zip(received, expected, strict=True), start=1):
        if got != want:
            return code, got, want, seen
    raise AssertionError("unequal tuples differ in an element")


def flags_of(memory: Any) -> int:
    """The flags of the header in a buffer, which may be wrong."""
    (flags,) = _FLAGS.unpack_from(memory, FIELD_OFFSETS["flags"])
    return flags


class Status(enum.IntEnum):
    """Indices into the status of a device, int64 words in which kernels report on packets."""

    FLAGS = 0
    """All flags among `RAISED`, of this rank and of every rank whose packets it has checked."""
    CODE = 1
    """The code of the first packet that was refused, or `REFUSED_BY_PEER`, or `ABSENT`; 0 if there was none."""
    SENDER = 2
    STEP = 3
    BUCKET = 4
    GOT = 5
    WANT = 6


REFUSED_BY_PEER = len(CHECKED) + 1
"""Another rank has refused a packet."""
ABSENT = REFUSED_BY_PEER + 1
"""Not about a packet: ranks of a node have gradients for different parameters."""
STATUS_WORDS = 8

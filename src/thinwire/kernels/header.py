"""The header in front of every packet: its fields, and the codes by which a device tells what is wrong with one."""

from __future__ import annotations

import enum

MAGIC = 0x5754  # "TW" in memory
VERSION = 2
CHECKSUM_FORMAT = "<I"
FIELDS_FORMAT = "<HHHHQIII"
"""Magic, version, flags, sender, step, bucket, length and layout; the CRC-32C of all that follows it stands before."""
HEADER_BYTES = 32

NONFINITE = 1
"""A gradient of the sender was not finite: nobody takes this step."""
REFUSED = 2
"""The sender got a packet that it could not accept: everybody stops."""
ACTIVATION = 4
"""The bits say which coordinates live, not which way they vote."""
SYNCHRONIZE = 8
"""An exchange by itself, outside of any step."""
RAISED = NONFINITE | REFUSED
"""Flags that a receiver learns, the others being those that it expects."""

CHECKED = ("checksum", "magic", "version", "sender", "step", "bucket", "length", "layout", "greeting", "synchronize")
"""What is looked at, in this order: the rest means nothing without the checksum, and whoever differs in the step may
differ in the kind of the exchange for the same reason."""


class Status(enum.IntEnum):
    """Where in its status, int64 words, a device keeps what it has learnt of packets."""

    FLAGS = 0
    """All flags among `RAISED`, by this rank or by any that it has answer_words from."""
    CODE = 1
    """Of the first packet that was refused, one more than the index in `CHECKED`; 0 when there was none, and one more
    than the largest of them when it was another rank that has refused one."""
    SENDER = 2
    STEP = 3
    BUCKET = 4
    GOT = 5
    WANT = 6


REFUSED_BY_PEER = len(CHECKED) + 1
ABSENT = REFUSED_BY_PEER + 1
"""Not of a packet: ranks of a node have gradients for different parameters."""
STATUS_WORDS = 8

"""Headers and checksums of packets where only the device that made them can read them."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.kernels.header import (
    ACTIVATION,
    CHECKED,
    CHECKSUM_FORMAT,
    FIELDS_FORMAT,
    HEADER_BYTES,
    MAGIC,
    RAISED,
    REFUSED,
    REFUSED_BY_PEER,
    SYNCHRONIZE,
    VERSION,
    Status,
)
from thinwire.kernels.reference.crc import crc32c

_CHECKSUM = struct.Struct(CHECKSUM_FORMAT)
_FIELDS = struct.Struct(FIELDS_FORMAT)


def packet_seal(
    packets: Tensor,
    status: Tensor,
    *,
    step: int,
    bucket: int,
    sender: int,
    flags: int,
    layout: int,
    checksum: Callable[[Tensor], int] = crc32c,
) -> None:
    """Put a header and a checksum in front of every row; its flags are `flags` and those that `status` has raised."""
    length = packets.shape[1] - HEADER_BYTES
    raised = flags | (int(status[Status.FLAGS]) & RAISED)
    header = _FIELDS.pack(MAGIC, VERSION, raised, sender, step, bucket, length, layout)
    for row in packets:
        row[_CHECKSUM.size : HEADER_BYTES] = _bytes(header, row.device)
        row[: _CHECKSUM.size] = _bytes(_CHECKSUM.pack(checksum(row[_CHECKSUM.size :])), row.device)


def packet_check(
    packets: Tensor,
    senders: Tensor,
    status: Tensor,
    *,
    step: int,
    bucket: int,
    flags: int,
    layout: int,
    copies: int = 1,
    checksum: Callable[[Tensor], int] = crc32c,
) -> None:
    """Note in `status` what the senders of the rows have raised, and the first packet that is not the expected one.

    A row is `copies` packets after each other that say the same: the first that is as expected counts.
    """
    for row, sender in zip(packets, senders.tolist(), strict=True):
        outcomes = [_look(packet, sender, step, bucket, flags, layout, checksum) for packet in row.view(copies, -1)]
        code, got, want, raised = next((outcome for outcome in outcomes if not outcome[0]), outcomes[-1])
        if not code and raised & REFUSED:
            code = REFUSED_BY_PEER
        if code:
            raised |= REFUSED
        status[Status.FLAGS] |= raised
        if code and not int(status[Status.CODE]):
            for field, value in zip(
                (Status.CODE, Status.SENDER, Status.STEP, Status.BUCKET, Status.GOT, Status.WANT),
                (code, sender, step, bucket, got, want),
                strict=True,
            ):
                status[field] = value


def _look(
    packet: Tensor, sender: int, step: int, bucket: int, flags: int, layout: int, checksum: Callable[[Tensor], int]
) -> tuple[int, int, int, int]:
    """Which field is wrong, counted from 1, what it is and what it should be; or zeros, and what was raised."""
    head = bytes(packet[:HEADER_BYTES].tolist())
    (claimed,) = _CHECKSUM.unpack_from(head)
    magic, version, seen, *fields = _FIELDS.unpack_from(head, _CHECKSUM.size)
    received = (claimed, magic, version, *fields, seen & ACTIVATION, seen & SYNCHRONIZE)
    due = (checksum(packet[_CHECKSUM.size :]), MAGIC, VERSION, sender, step, bucket, packet.numel() - HEADER_BYTES)
    wanted = (*due, layout, flags & ACTIVATION, flags & SYNCHRONIZE)
    for code, (_, got, want) in enumerate(zip(CHECKED, received, wanted, strict=True), start=1):
        if got != want:
            return code, got, want, 0
    return 0, 0, 0, seen & RAISED


def _bytes(data: bytes, device: torch.device) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8, device=device)

"""Headers and checksums of packets that only the device that made them can read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.kernels import header
from thinwire.kernels.header import CHECKSUM, HEADER_BYTES, RAISED, REFUSED, REFUSED_BY_PEER, Status
from thinwire.kernels.reference.crc import crc32c


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
    """Write a header and a checksum to every row; its flags are `flags` and those that `status` has raised."""
    head = bytearray(HEADER_BYTES)
    raised = flags | (int(status[Status.FLAGS]) & RAISED)
    length = packets.shape[1] - HEADER_BYTES
    header.write(head, flags=raised, sender=sender, step=step, bucket=bucket, length=length, layout=layout)
    for row in packets:
        row[CHECKSUM.size : HEADER_BYTES] = _bytes(head[CHECKSUM.size :], row.device)
        row[: CHECKSUM.size] = _bytes(CHECKSUM.pack(checksum(row[CHECKSUM.size :])), row.device)


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
    """Write to `status` which flags the senders of the rows raised, and the first packet that is not as expected.

    A row consists of `copies` copies of one packet: the first that is as expected counts, or else the last.
    """
    for row, sender in zip(packets, senders.tolist(), strict=True):
        outcomes = [_check(packet, sender, step, bucket, flags, layout, checksum) for packet in row.view(copies, -1)]
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


def _check(
    packet: Tensor, sender: int, step: int, bucket: int, flags: int, layout: int, checksum: Callable[[Tensor], int]
) -> tuple[int, int, int, int]:
    """The result of `header.compare`; flags only of a packet that is as expected."""
    code, got, want, seen = header.compare(
        bytes(packet[:HEADER_BYTES].tolist()),
        checksum(packet[CHECKSUM.size :]),
        flags=flags,
        sender=sender,
        step=step,
        bucket=bucket,
        length=packet.numel() - HEADER_BYTES,
        layout=layout,
    )
    return code, got, want, 0 if code else seen & RAISED


def _bytes(data: bytes | bytearray, device: torch.device) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8, device=device)

"""Headers and checksums of packets on GPUs: the Triton kernels, interpreted on the CPU, equal the reference."""

from __future__ import annotations

import importlib
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.kernel_cases import allocation, copy_of, guarded, long, random, random_bytes
from thinwire.kernels.header import (
    ACTIVATION,
    CHECKED,
    HEADER_BYTES,
    NONFINITE,
    REFUSED,
    REFUSED_BY_PEER,
    STATUS_WORDS,
    SYNCHRONIZE,
    Status,
)
from thinwire.kernels.reference import packets as reference
from thinwire.kernels.reference.crc import crc32c

pytest.importorskip("triton")

GROUP, TILE = 4 * 128, 4 * 128 * 16
LENGTHS = (0, 4, GROUP - 32, GROUP - 28, GROUP - 24, TILE - 32, TILE - 28, TILE - 24, 2 * TILE + 500)
"""Of what follows the header, in bytes: checksums are computed of groups and tiles of words."""
CHECKSUM_FORMAT, FIELDS_FORMAT = "<I", "<HHHHQIII"
"""As docs/protocol.md has them, to compare with what follows from the table of fields."""
FIELDS = ("checksum", "magic", "version", "flags", "sender", "step", "bucket", "length", "layout")
EXPECTED: dict[str, int] = {"step": 2**33 + 5, "bucket": 3, "flags": ACTIVATION, "layout": 0xFEDCBA98}


def operation(name: str) -> Any:
    return getattr(importlib.import_module("thinwire.kernels.triton"), name)


def a_status(flags: int = 0, code: int = 0) -> Tensor:
    status = torch.arange(100, 100 + STATUS_WORDS)
    status[Status.FLAGS], status[Status.CODE] = flags, code
    return guarded(status)


def sealed(rows: int, length: int, *, seed: int = 0, gap: int = 0, copies: int = 1) -> Tensor:
    """A row for each of the senders 1, 2, ..., with `gap` bytes between them and the same packet `copies` times."""
    size = HEADER_BYTES + length
    packets = guarded(random_bytes(rows, copies * size + gap, generator=random(seed)))[:, : copies * size]
    for sender, row in enumerate(packets, start=1):
        fields: dict[str, Any] = EXPECTED | {"sender": sender}
        first = row.view(copies, -1)[:1]
        reference.packet_seal(first, a_status(), **fields)
        row.view(copies, -1)[1:] = first
    return packets


def fields_of(packet: Tensor) -> dict[str, int]:
    head = bytes(packet[:HEADER_BYTES].tolist())
    values = (*struct.unpack_from(CHECKSUM_FORMAT, head), *struct.unpack_from(FIELDS_FORMAT, head, 4))
    return dict(zip(FIELDS, values, strict=True))


def forge(packet: Tensor, **fields: int) -> None:
    """Write other fields into a packet, and a checksum that fits unless it is one of them."""
    others = fields_of(packet) | fields
    head = struct.pack(FIELDS_FORMAT, *(others[name] for name in FIELDS[1:]))
    packet[4:HEADER_BYTES] = torch.tensor(list(head), dtype=torch.uint8)
    checksum = fields["checksum"] if "checksum" in fields else crc32c(packet[4:].contiguous())
    packet[:4] = torch.tensor(list(struct.pack(CHECKSUM_FORMAT, checksum)), dtype=torch.uint8)


def same_as_reference(name: str, **arguments: Any) -> Tensor:
    """Both, on copies of everything; all memory must be the same. Returns the status."""
    copy = {name: copy_of(argument) for name, argument in arguments.items()}
    getattr(reference, name)(**arguments)
    operation(name)(**copy)
    for argument, value in arguments.items():
        if isinstance(value, Tensor):
            assert copy[argument].tolist() == value.tolist(), argument
            assert torch.equal(allocation(copy[argument]), allocation(value)), argument
    return arguments["status"]


def checked(packets: Tensor, *, status: Tensor | None = None, copies: int = 1, **changes: int) -> dict[str, int]:
    """What `packet_check` notes, on both; senders are 1, 2, ..., as `sealed` has it."""
    noted = same_as_reference(
        "packet_check",
        packets=packets,
        senders=torch.arange(1, 1 + packets.shape[0]),
        status=a_status() if status is None else status,
        copies=copies,
        **(EXPECTED | changes),
    )
    return {field.name: int(noted[field]) for field in Status}


# Seal -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_seal_for_every_length(length: int) -> None:
    packets = guarded(random_bytes(2, HEADER_BYTES + length + 12, generator=random(length)))[:, :-12]
    fields = {"step": 7, "bucket": 0, "sender": 0, "flags": 0, "layout": 1}
    same_as_reference("packet_seal", packets=packets, status=a_status(), **fields)
    assert fields_of(packets[1])["checksum"] == crc32c(packets[1][4:].contiguous())


@pytest.mark.parametrize("raised", [0, NONFINITE, REFUSED, NONFINITE | REFUSED, 0xFF00])
@pytest.mark.parametrize("flags", [0, ACTIVATION, SYNCHRONIZE | REFUSED])
def test_seal_writes_the_raised_flags(raised: int, flags: int) -> None:
    packets = guarded(random_bytes(1, HEADER_BYTES + 8, generator=random(0)))
    fields = {"step": 2**40 + 1, "bucket": 2**32 - 1, "sender": 65535, "flags": flags, "layout": 2**32 - 1}
    same_as_reference("packet_seal", packets=packets, status=a_status(raised), **fields)
    wanted = fields | {"flags": flags | raised & (NONFINITE | REFUSED)}
    assert wanted.items() <= fields_of(packets[0]).items()


@pytest.mark.parametrize("step", [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1])
@pytest.mark.parametrize("layout", [0, 2**31, 2**32 - 1])
def test_seal_and_check_with_any_step(step: int, layout: int) -> None:
    packets = guarded(random_bytes(1, HEADER_BYTES + 8, generator=random(0)))
    fields: dict[str, Any] = {"step": step, "bucket": 1, "flags": 0, "layout": layout}
    same_as_reference("packet_seal", packets=packets, status=a_status(), sender=1, **fields)
    assert checked(packets, **fields)["CODE"] == 0


# Check ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "length", [*LENGTHS[::4], *long(*(length for length in LENGTHS if length not in LENGTHS[::4]))]
)
def test_check_for_every_length(length: int) -> None:
    packets = sealed(3, length, gap=20)
    untouched = checked(packets)
    assert untouched["FLAGS"] == untouched["CODE"] == 0
    assert untouched["SENDER"] == 100 + Status.SENDER
    packets[2, -1] ^= 0x80
    assert checked(packets)["CODE"] == 1 + CHECKED.index("checksum")


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 33])
def test_check_of_any_number_of_rows(rows: int) -> None:
    assert checked(sealed(rows, 16))["CODE"] == 0


@pytest.mark.parametrize(
    ("field", "forged"),
    [
        ("magic", {"magic": 0xFFFF}),
        ("version", {"version": 1}),
        ("sender", {"sender": 65535}),
        ("step", {"step": 5}),
        ("step", {"step": 2**33 + 4}),
        ("step", {"step": 2**63 - 1}),
        ("bucket", {"bucket": 2**32 - 1}),
        ("length", {"length": 15}),
        ("layout", {"layout": 0x7EDCBA98}),
        ("activation", {"flags": 0}),
        ("activation", {"flags": SYNCHRONIZE}),
        ("synchronize", {"flags": ACTIVATION | SYNCHRONIZE}),
        ("synchronize", {"flags": ACTIVATION | SYNCHRONIZE | NONFINITE | REFUSED}),
        ("magic", {"magic": 1, "version": 1, "sender": 9, "step": 0}),
        ("step", {"step": 1, "bucket": 9, "layout": 9, "flags": SYNCHRONIZE}),
    ],
    ids=str,
)
def test_check_names_the_first_field_that_is_wrong(field: str, forged: dict[str, int]) -> None:
    packets = sealed(3, 16)
    forge(packets[1], **forged)
    noted = checked(packets)
    assert noted["CODE"] == 1 + CHECKED.index(field)
    assert noted["FLAGS"] == REFUSED
    assert (noted["SENDER"], noted["STEP"], noted["BUCKET"]) == (2, EXPECTED["step"], EXPECTED["bucket"])
    if field in forged:
        assert noted["GOT"] == forged[field]
    forge(packets[1], checksum=fields_of(packets[1])["checksum"] ^ 0x80000000)
    assert checked(packets)["CODE"] == 1 + CHECKED.index("checksum")


@pytest.mark.parametrize("byte", [0, 3, 4, 8, 12, 31, 32, 47])
def test_check_sees_every_byte(byte: int) -> None:
    packets = sealed(2, 16)
    packets[0, byte] ^= 1
    noted = checked(packets)
    assert (noted["CODE"], noted["SENDER"]) == (1, 1)
    assert noted["GOT"] != noted["WANT"]


def test_check_notes_the_lowest_row_and_what_all_have_raised() -> None:
    packets = sealed(6, 16)
    forge(packets[4], flags=ACTIVATION | NONFINITE)
    assert checked(packets)["FLAGS"] == NONFINITE
    forge(packets[3], bucket=8)
    forge(packets[2], step=9)
    noted = checked(packets)
    assert (noted["CODE"], noted["SENDER"], noted["GOT"]) == (1 + CHECKED.index("step"), 3, 9)
    assert noted["FLAGS"] == NONFINITE | REFUSED


def test_check_reports_the_refusal_of_a_peer() -> None:
    packets = sealed(3, 16)
    forge(packets[1], flags=ACTIVATION | REFUSED)
    forge(packets[2], step=9)
    noted = checked(packets)
    assert (noted["CODE"], noted["SENDER"], noted["GOT"], noted["WANT"]) == (REFUSED_BY_PEER, 2, 0, 0)


def test_check_keeps_what_was_noted_before() -> None:
    packets = sealed(2, 16)
    forge(packets[0], step=9)
    noted = checked(packets, status=a_status(NONFINITE, 4))
    assert (noted["CODE"], noted["FLAGS"]) == (4, NONFINITE | REFUSED)
    assert noted["GOT"] == 100 + Status.GOT


@pytest.mark.parametrize("copies", [2, 3])
def test_check_is_content_with_one_good_copy(copies: int) -> None:
    for broken in range(copies):
        packets = sealed(2, GROUP + 4, copies=copies, gap=8, seed=broken)
        packets[0].view(copies, -1)[broken, 50] ^= 1
        assert checked(packets, copies=copies)["CODE"] == 0
    packets = sealed(2, 16, copies=copies)
    for row in packets[1].view(copies, -1):
        forge(row, bucket=9)
    forge(packets[1].view(copies, -1)[-1], step=8)
    noted = checked(packets, copies=copies)
    assert (noted["CODE"], noted["SENDER"], noted["GOT"]) == (1 + CHECKED.index("step"), 2, 8)


def test_check_takes_what_the_first_good_copy_has_raised() -> None:
    packets = sealed(1, 16, copies=2)
    forge(packets[0].view(2, -1)[1], flags=ACTIVATION | NONFINITE)
    assert checked(packets, copies=2)["FLAGS"] == 0
    packets[0, 0] ^= 1
    assert checked(packets, copies=2)["FLAGS"] == NONFINITE

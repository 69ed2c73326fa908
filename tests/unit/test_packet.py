"""A packet that is not the one expected is refused by name, field by field, before anything in it is believed."""

from __future__ import annotations

import dataclasses
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.errors import CorruptPacket
from thinwire.kernels import header, ops
from thinwire.transport.empty import Shortened
from thinwire.transport.packet import ACTIVATION, HEADER_BYTES, NONFINITE, REFUSED, Header, Packet

KERNELS = ops.backend(torch.device("cpu"))
HEADER = Header(step=7, bucket=3, sender=2, length=4096, layout=0xDEADBEEF, flags=0)
U32 = st.integers(0, 2**32 - 1)
HEADERS = st.builds(
    Header,
    step=st.integers(0, 2**64 - 1),
    bucket=U32,
    sender=st.integers(0, 2**16 - 1),
    length=U32,
    layout=U32,
    flags=st.integers(0, 7),
)


def sealed(header: Header, payload: bytes = b"") -> Tensor:
    row = torch.tensor(list(b"\xa5" * HEADER_BYTES + payload), dtype=torch.uint8)
    header.seal(Packet(row), KERNELS)
    return row


def forged(header: Header, at: int, field: bytes) -> Tensor:
    """A packet with other bytes at some place, and a checksum that fits them."""
    row = sealed(header)
    row[at : at + len(field)] = torch.tensor(list(field), dtype=torch.uint8)
    row[:4] = torch.tensor(list(struct.pack("<I", KERNELS.crc32c(row[4:]))), dtype=torch.uint8)
    return row


def test_the_header_is_laid_out_as_the_protocol_says() -> None:
    row = bytes(sealed(dataclasses.replace(HEADER, flags=NONFINITE | ACTIVATION), b"payload").tolist())
    assert HEADER_BYTES == 32
    assert row[4:6] == b"TW"
    assert struct.unpack_from("<HHHQIII", row, 6) == (4, 5, 2, 7, 3, 4096, 0xDEADBEEF)
    assert row[32:] == b"payload"
    assert (NONFINITE, REFUSED, ACTIVATION, header.DISAGREE, header.EMPTY) == (1, 2, 4, 16, 32)


def test_the_checksum_is_that_of_everything_behind_it() -> None:
    row = sealed(HEADER, b"payload")
    assert struct.unpack_from("<I", bytes(row.tolist())) == (KERNELS.crc32c(row[4:].clone()),)


@settings(deadline=None)
@given(HEADERS, st.binary(max_size=40))
def test_what_is_sealed_is_accepted_as_it_is(header: Header, payload: bytes) -> None:
    row = sealed(header, payload)
    assert header.check(Packet(row), KERNELS) == header.flags
    assert bytes(row[HEADER_BYTES:].tolist()) == payload


@pytest.mark.parametrize("flags", [0, NONFINITE, REFUSED, NONFINITE | REFUSED])
@pytest.mark.parametrize("greeting", [0, ACTIVATION])
@pytest.mark.parametrize("own", [0, NONFINITE])
def test_flags_that_a_peer_may_raise_pass_through(flags: int, greeting: int, own: int) -> None:
    """Whatever this rank has raised itself, a peer may raise more, or less; only the greeting must be common."""
    sent = dataclasses.replace(HEADER, flags=flags | greeting)
    expected = dataclasses.replace(HEADER, flags=own | greeting)
    assert expected.check(Packet(sealed(sent)), KERNELS) == flags | greeting


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", 8), ("step", 7 + 2**32), ("bucket", 0), ("sender", 1), ("length", 4104), ("layout", 0xDEADBEEE)],
)
def test_every_field_that_differs_is_named(field: str, value: int) -> None:
    sent = dataclasses.replace(HEADER, **{field: value})
    wanted = getattr(HEADER, field)
    with pytest.raises(CorruptPacket, match=rf"rank 2 for step 7, bucket 3: {field} is {value}, expected {wanted}\b"):
        HEADER.check(Packet(sealed(sent)), KERNELS)


@pytest.mark.parametrize(("sent", "expected"), [(ACTIVATION, 0), (0, ACTIVATION), (ACTIVATION | NONFINITE, NONFINITE)])
def test_a_greeting_is_never_taken_for_votes_nor_votes_for_a_greeting(sent: int, expected: int) -> None:
    row = sealed(dataclasses.replace(HEADER, flags=sent))
    with pytest.raises(CorruptPacket, match=f"activation is {sent & ACTIVATION}, expected {expected & ACTIVATION}"):
        dataclasses.replace(HEADER, flags=expected).check(Packet(row), KERNELS)


def test_a_foreign_packet_is_named_by_its_magic() -> None:
    foreign = int.from_bytes(b"HT", "little")
    with pytest.raises(CorruptPacket, match=f"magic is {foreign}, expected {header.MAGIC}"):
        HEADER.check(Packet(forged(HEADER, 4, b"HT")), KERNELS)


def test_another_version_is_refused_before_its_fields_are_read() -> None:
    """They may mean something else there: the version is what is reported, though the step differs as well."""
    row = forged(dataclasses.replace(HEADER, step=99), 6, struct.pack("<H", 3))
    with pytest.raises(CorruptPacket, match="version is 3, expected 4: all ranks must run the same version"):
        HEADER.check(Packet(row), KERNELS)


@pytest.mark.parametrize(
    ("field", "advice"),
    [("step", "call step\\(\\) equally often"), ("layout", "the same parameters in the same order")],
)
def test_what_a_user_can_mend_comes_with_advice(field: str, advice: str) -> None:
    sent = dataclasses.replace(HEADER, **{field: 1})
    with pytest.raises(CorruptPacket, match=advice):
        HEADER.check(Packet(sealed(sent)), KERNELS)


def test_an_empty_buffer_is_no_packet() -> None:
    """What a peer that sent nothing leaves behind: zeros."""
    with pytest.raises(CorruptPacket, match="checksum is 0"):
        HEADER.check(Packet(torch.zeros(HEADER_BYTES, dtype=torch.uint8)), KERNELS)


@settings(deadline=None)
@given(HEADERS, st.binary(max_size=40), st.data())
def test_no_flipped_bit_goes_unseen(header: Header, payload: bytes, data: st.DataObject) -> None:
    row = sealed(header, payload)
    bit = data.draw(st.integers(0, 8 * row.numel() - 1))
    row[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptPacket, match=r"checksum is .*: the packet was changed on its way"):
        header.check(Packet(row), KERNELS)


# Packets of zeros ----------------------------------------------------------------------------------------------------

PRESENCE = HEADER_BYTES + 24
"""Where the presence bits of a row of three words and them begin."""


def arrived(message: Tensor) -> Tensor:
    """What a receiver has whose row held something else before."""
    row = torch.full((PRESENCE + 8,), 0xAB, dtype=torch.uint8)
    row[: message.numel()] = message
    return row


@pytest.mark.parametrize("flags", [0, NONFINITE, REFUSED | NONFINITE])
@pytest.mark.parametrize("payload", [bytes(24), bytes(23) + b"\1"])
def test_a_packet_arrives_as_it_was_sealed_whether_or_not_its_zeros_travel(flags: int, payload: bytes) -> None:
    sent = dataclasses.replace(HEADER, flags=flags, length=32)
    row = sealed(sent, payload + b"presence")
    message = Shortened(row, PRESENCE).message(sent, KERNELS)
    assert message.numel() == (row.numel() if any(payload) else HEADER_BYTES + 8)
    received = arrived(message)
    # The receiver does not know the flags yet.
    assert Shortened(received, PRESENCE).restore(dataclasses.replace(sent, flags=0), KERNELS) == message.numel()
    assert torch.equal(received, row)


def test_a_short_message_that_is_not_the_one_that_is_due_is_refused() -> None:
    sent = dataclasses.replace(HEADER, length=32)
    message = Shortened(sealed(sent, bytes(24) + b"presence"), PRESENCE).message(sent, KERNELS)
    with pytest.raises(CorruptPacket, match="step is 7, expected 8"):
        Shortened(arrived(message), PRESENCE).restore(dataclasses.replace(sent, step=8), KERNELS)
    for bit in range(8 * message.numel()):
        changed = message.clone()
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptPacket):
            restore_and_check(arrived(changed), sent)


def restore_and_check(row: Tensor, expected: Header) -> None:
    Shortened(row, PRESENCE).restore(expected, KERNELS)
    expected.check(Packet(row), KERNELS)  # without EMPTY, it is taken for a whole packet

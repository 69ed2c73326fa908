"""A packet that is not the one expected is refused by name, field by field, before anything in it is believed."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.wire import packet
from thinwire.wire.packet import GREETING, HEADER_BYTES, NONFINITE, REFUSED, Header

HEADER = Header(step=7, bucket=3, sender=2, length=4096, layout=0xDEADBEEF, flags=0)
U32 = st.integers(0, 2**32 - 1)
HEADERS = st.builds(
    Header,
    step=st.integers(0, 2**64 - 1),
    bucket=U32,
    sender=U32,
    length=U32,
    layout=U32,
    flags=st.integers(0, 7),
)


def written(header: Header, at: int = 0, room: int = 0) -> bytearray:
    memory = bytearray(b"\xa5" * (at + HEADER_BYTES + room))
    header.write(memoryview(memory), at)
    return memory


def test_the_header_is_laid_out_as_the_protocol_says() -> None:
    memory = written(dataclasses.replace(HEADER, flags=NONFINITE | GREETING))
    assert len(memory) == HEADER_BYTES == 32
    assert memory[:4] == b"TWIR"
    assert struct.unpack_from("<HH", memory, 4) == (1, 5)
    assert struct.unpack_from("<Q", memory, 8) == (7,)
    assert struct.unpack_from("<IIII", memory, 16) == (3, 2, 4096, 0xDEADBEEF)
    assert (NONFINITE, REFUSED, GREETING) == (1, 2, 4)


@settings(deadline=None)
@given(HEADERS, st.integers(0, 40), st.integers(0, 40))
def test_what_is_written_is_accepted_wherever_it_stands(header: Header, at: int, room: int) -> None:
    memory = written(header, at, room)
    assert header.check(memoryview(memory), at) == header.flags
    assert memory[:at] + memory[at + HEADER_BYTES :] == b"\xa5" * (at + room)


@pytest.mark.parametrize("flags", [0, NONFINITE, REFUSED, NONFINITE | REFUSED])
@pytest.mark.parametrize("greeting", [0, GREETING])
@pytest.mark.parametrize("own", [0, NONFINITE])
def test_flags_that_a_peer_may_raise_pass_through(flags: int, greeting: int, own: int) -> None:
    """Whatever this rank has raised itself, a peer may raise more, or less; only the greeting must be common."""
    sent = dataclasses.replace(HEADER, flags=flags | greeting)
    expected = dataclasses.replace(HEADER, flags=own | greeting)
    assert expected.check(memoryview(written(sent)), 0) == flags | greeting


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", 8), ("step", 7 + 2**32), ("bucket", 0), ("sender", 1), ("length", 4104), ("layout", 0xDEADBEEE)],
)
def test_every_field_that_differs_is_named(field: str, value: int) -> None:
    sent = dataclasses.replace(HEADER, **{field: value})
    wanted = getattr(HEADER, field)
    with pytest.raises(RuntimeError, match=rf"rank 2 for step 7, bucket 3: {field} is {value}, expected {wanted}\b"):
        HEADER.check(memoryview(written(sent)), 0)


@pytest.mark.parametrize(("sent", "expected"), [(GREETING, 0), (0, GREETING), (GREETING | NONFINITE, NONFINITE)])
def test_a_greeting_is_never_taken_for_votes_nor_votes_for_a_greeting(sent: int, expected: int) -> None:
    memory = written(dataclasses.replace(HEADER, flags=sent))
    with pytest.raises(RuntimeError, match=f"greeting is {sent & GREETING}, expected {expected & GREETING}"):
        dataclasses.replace(HEADER, flags=expected).check(memoryview(memory), 0)


def test_a_foreign_packet_is_named_by_its_magic() -> None:
    memory = written(HEADER)
    memory[0] ^= 1
    foreign = int.from_bytes(memory[:4], "little")
    with pytest.raises(RuntimeError, match=f"magic is {foreign}, expected {packet.MAGIC}"):
        HEADER.check(memoryview(memory), 0)


def test_another_version_is_refused_before_its_fields_are_read() -> None:
    """They may mean something else there: the version is what is reported, though the step differs as well."""
    memory = written(dataclasses.replace(HEADER, step=99))
    struct.pack_into("<H", memory, 4, 2)
    with pytest.raises(RuntimeError, match="version is 2, expected 1: all ranks must run the same version of thinwire"):
        HEADER.check(memoryview(memory), 0)


@pytest.mark.parametrize(
    ("field", "advice"),
    [("step", "call step\\(\\) equally often"), ("layout", "the same parameters in the same order")],
)
def test_what_a_user_can_mend_comes_with_advice(field: str, advice: str) -> None:
    sent = dataclasses.replace(HEADER, **{field: 1})
    with pytest.raises(RuntimeError, match=advice):
        HEADER.check(memoryview(written(sent)), 0)


def test_an_empty_buffer_is_no_packet() -> None:
    """What a peer that sent nothing leaves behind: zeros."""
    with pytest.raises(RuntimeError, match="magic is 0"):
        HEADER.check(memoryview(bytes(HEADER_BYTES)), 0)


@settings(deadline=None)
@given(HEADERS, st.integers(0, 8 * HEADER_BYTES - 1))
def test_no_flipped_bit_goes_unseen(header: Header, bit: int) -> None:
    """It is an error, or (for a flag that a peer may raise) another answer."""
    memory = written(header)
    memory[bit // 8] ^= 1 << bit % 8
    try:
        flags = header.check(memoryview(memory), 0)
    except RuntimeError:
        return
    assert flags == header.flags ^ 1 << bit - 48
    assert 48 <= bit < 64

"""Packets that were altered on the way, against what a second reading of the protocol says of them."""

from __future__ import annotations

import dataclasses
import random
import struct

import torch

from tests.fuzz import mutate
from tests.fuzz.memory import Fences
from tests.instruction_sets import instruction_sets
from thinwire.errors import CorruptPacket
from thinwire.kernels import native
from thinwire.kernels.ops import BACKENDS
from thinwire.transport import packet
from thinwire.transport.packet import HEADER_BYTES, Header, Packet

LARGEST = 8192
_EXPECTED = struct.Struct("<BQIHIIH")
_HEADER = struct.Struct("<IHHHHQIII")
_NAMES = ("checksum", "magic", "version", "flags", "sender", "step", "bucket", "length", "layout")


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc_table()


def crc32c(data: bytes | bytearray) -> int:
    """By the book: RFC 3720."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def first_difference(expected: Header, received: bytes) -> str | None:
    """What is wrong with a packet, as docs/protocol.md tells; None if it is the one that was expected."""
    fields = dict(zip(_NAMES, _HEADER.unpack_from(received), strict=True))
    wanted = dataclasses.asdict(expected) | {"magic": 0x5754, "version": 4, "checksum": crc32c(received[4:])}
    names = [name for name in _NAMES if name != "flags" and fields[name] != wanted[name]]
    if (fields["flags"] ^ expected.flags) & packet.ACTIVATION:
        names.append("activation")
    if (fields["flags"] ^ expected.flags) & packet.SYNCHRONIZE:
        names.append("synchronize")
    return names[0] if names else None


class Packets:
    """`Header.check`, as it reads a row of the memory that packets are received in."""

    name = "packets"
    share = 0.84
    outcomes: tuple[str, ...] = (
        "accepted: as sent, or sealed again with no more than a peer may change",
        *(f"refused: {name}" for name in (*_NAMES, "activation", "synchronize") if name != "flags"),
    )

    def __init__(self) -> None:
        self._fences = Fences()
        self._room = self._fences.zeros(LARGEST, torch.uint8)
        self._isas = instruction_sets()
        self._kernels = BACKENDS["native" if self._isas else "reference"]

    def make(self, draw: random.Random) -> bytes:
        """A row: the packet that was due, as it was sent or altered, or another one."""
        size = 8 * draw.choice((0, 1, 2, 5, 12, 30, draw.randrange(31)))
        if draw.random() < 0.003:
            size = 8 * draw.randrange((LARGEST - HEADER_BYTES) // 8 + 1)
        due = self._header(draw, size)
        sent = self._sealed(due, draw.randbytes(size))
        kind = draw.randrange(10)
        if kind == 0:
            received = sent
        elif kind == 1:
            received = draw.randbytes(len(sent))
        elif kind == 2:  # cut off: the rest of the row is what was there before, or nothing
            before = self._sealed(dataclasses.replace(due, step=due.step - 1 & 2**64 - 1), draw.randbytes(size))
            at = draw.randrange(len(sent) + 1)
            received = sent[:at] + draw.choice((before, bytes(len(before))))[at:]
        elif kind in (3, 4):  # somebody else's, in another place
            received = self._sealed(self._neighbour(draw, due), sent[HEADER_BYTES:])
        elif kind == 5:  # altered by somebody who knows how to seal
            altered = bytearray(mutate.damaged(draw, sent))
            struct.pack_into("<I", altered, 0, crc32c(altered[4:]))
            received = bytes(altered)
        elif kind == 6:  # the header only
            received = mutate.damaged(draw, sent[:HEADER_BYTES]) + sent[HEADER_BYTES:]
        else:
            received = mutate.damaged(draw, sent)
        isa = draw.randrange(256)
        expected = (isa, due.step, due.bucket, due.sender, due.length, due.layout, due.flags)
        return _EXPECTED.pack(*expected) + received

    def _header(self, draw: random.Random, size: int) -> Header:
        def number(bits: int) -> int:
            return draw.choice((draw.randrange(16), draw.getrandbits(bits), draw.choice(mutate.LIMITS) % 2**bits))

        flags = draw.choice((0, 0, packet.ACTIVATION, packet.SYNCHRONIZE, packet.NONFINITE, draw.randrange(16)))
        return Header(number(64), number(32), number(16), size, number(32), flags)

    def _neighbour(self, draw: random.Random, due: Header) -> Header:
        field, bits = draw.choice((("step", 64), ("bucket", 32), ("sender", 16), ("length", 32), ("layout", 32)))
        if draw.random() < 0.3:
            return dataclasses.replace(due, flags=due.flags ^ 1 << draw.randrange(4))
        value = draw.choice((getattr(due, field) + 1, getattr(due, field) ^ 1 << draw.randrange(bits)))
        return dataclasses.replace(due, **{field: value % 2**bits})

    def _sealed(self, header: Header, payload: bytes) -> bytes:
        fields = (header.flags, header.sender, header.step, header.bucket, header.length, header.layout)
        rest = _HEADER.pack(0, 0x5754, 2, *fields)[4:] + payload
        return struct.pack("<I", crc32c(rest)) + rest

    def run(self, data: bytes) -> str:
        """See `Target`."""
        isa, step, bucket, sender, length, layout, flags = _EXPECTED.unpack_from(data)
        due, received = Header(step, bucket, sender, length, layout, flags), data[_EXPECTED.size :]
        if self._isas:
            native.use_isa(self._isas[isa % len(self._isas)])
        row = self._room[LARGEST - len(received) :]
        row.copy_(torch.frombuffer(bytearray(received), dtype=torch.uint8))
        wrong = first_difference(due, received)
        try:
            heard = due.check(Packet(row), self._kernels)
        except CorruptPacket as error:
            heard = str(error).split(": ", 1)[1].split(" is ")[0]
        if isinstance(heard, str):
            assert heard == wrong, f"refused for its {heard}, but what is wrong is {wrong}"
            return f"refused: {heard}"
        assert wrong is None, f"accepted, but its {wrong} is wrong"
        assert heard == struct.unpack_from("<H", received, 8)[0], "other flags than were sent"
        return self.outcomes[0]

"""Peers who are not there: what a rank would hear from them is made up here, with headers that are right.

A group of them takes what it is sent, and answers with messages of as many packets as it was sent under the same tag.
Their headers are copies, in the name of the stranger, and sealed again; the rest is up to `Voice`.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from tests.fuzz import mutate
from thinwire.kernels.ops import Kernels
from thinwire.transport.connections import Connection
from thinwire.transport.packet import HEADER_BYTES
from thinwire.transport.peers import Peers

_SHORT, _LONG = struct.Struct("<H"), struct.Struct("<I")
_FLAGS_AT, _SENDER_AT, _LENGTH_AT = 8, 10, 24


class Voice(Protocol):
    """What strangers say."""

    def payload(self, own: bytes) -> bytes:
        """Instead of what this rank has said in its own packet."""
        ...

    def flags(self, own: int) -> int:
        """In the header."""
        ...


class Echo:
    """Strangers who say what this rank says."""

    def payload(self, own: bytes) -> bytes:
        """See `Voice`."""
        return own

    def flags(self, own: int) -> int:
        """See `Voice`."""
        return own


class Hostile:
    """Strangers who say anything at all, most of the time."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._honest = draw.choice((0.0, 0.0, 0.5, 0.9))
        self._style = draw.randrange(3)
        self._lies_about_flags = draw.random() < 0.03

    def payload(self, own: bytes) -> bytes:
        """See `Voice`."""
        if self._draw.random() < self._honest:
            return own
        if self._style == 0:
            return mutate.damaged(self._draw, own)
        # What is refused goes no further: let indices be right, and the values behind them anything.
        kept = (len(own) - 8) // 2 if self._style == 1 else 0
        return own[:kept] + mutate.hostile(self._draw, len(own) - kept)

    def flags(self, own: int) -> int:
        """See `Voice`."""
        return own ^ 1 << self._draw.randrange(16) if self._lies_about_flags and self._draw.random() < 0.2 else own


@dataclass
class Line:
    """What is common to all groups of a rank."""

    kernels: Kernels
    voice: Voice = field(default_factory=Echo)


class Sent:
    """A message that is gone at once."""

    def wait(self, timeout: object = None) -> bool:
        """See `torch.distributed.Work`."""
        return True


class Group:
    """Stands for a process group.

    Args:
        members: their ranks.
        own: which of them is this one.
        line: what they say.
        sender: the rank that a stranger writes into a header, where this one has written that rank.
    """

    _device_types = (torch.device("cpu"),)

    def _get_backend(self, _: torch.device) -> Group:
        return self

    def name(self) -> str:
        return "gloo"

    def __init__(
        self,
        members: Sequence[int],
        own: int,
        line: Line,
        sender: Callable[[int, int], int],
    ) -> None:
        self._members, self._own = members, own
        self._line, self._sender = line, sender
        self._sent: dict[int, Tensor] = {}

    def size(self) -> int:
        """How many there are."""
        return len(self._members)

    def rank(self) -> int:
        """This one's position."""
        return self._own

    def send(self, rows: list[Tensor], member: int, tag: int) -> Sent:
        """Keep what was sent last."""
        self._sent[tag] = rows[0]
        return Sent()

    def recv(self, rows: list[Tensor], member: int, tag: int) -> Any:
        """A message that arrives when somebody waits for it."""
        return _Due(self, rows[0], member, tag)

    def deliver(self, row: Tensor, member: int, tag: int) -> None:
        """Say something."""
        own = self._sent.get(tag)
        if own is None:  # a receive that abort_group() posts
            raise RuntimeError("Connection closed by peer")
        at = 0
        while at < own.numel():
            (length,) = _LONG.unpack_from(own[at : at + HEADER_BYTES].numpy().tobytes(), _LENGTH_AT)
            end = at + HEADER_BYTES + length
            self._deliver_packet(row[at:end], own[at:end], member)
            at = end

    def _deliver_packet(self, to: Tensor, own: Tensor, member: int) -> None:
        contents, voice = bytearray(own.numpy().tobytes()), self._line.voice
        (flags,), (sender,) = _SHORT.unpack_from(contents, _FLAGS_AT), _SHORT.unpack_from(contents, _SENDER_AT)
        _SHORT.pack_into(contents, _FLAGS_AT, voice.flags(flags))
        _SHORT.pack_into(contents, _SENDER_AT, self._sender(sender, member))
        if len(contents) > HEADER_BYTES:
            contents[HEADER_BYTES:] = voice.payload(bytes(contents[HEADER_BYTES:]))
        to.copy_(torch.frombuffer(contents, dtype=torch.uint8))
        checksum = bytearray(_LONG.pack(self._line.kernels.crc32c(to[_LONG.size :])))
        to[: _LONG.size] = torch.frombuffer(checksum, dtype=torch.uint8)


@dataclass(frozen=True)
class _Due:
    group: Group
    row: Tensor
    member: int
    tag: int

    def wait(self, timeout: object = None) -> bool:
        self.group.deliver(self.row, self.member, self.tag)
        return True


@dataclass(frozen=True)
class Strangers(Peers):
    """All ranks but this one are made up."""

    line: Line
    nodes: tuple[tuple[int, ...], ...]

    @property
    def threaded(self) -> bool:
        """Lanes run on the calling thread, so that each input gives the same order of events every time."""
        return False

    def ranks(self) -> list[int]:
        """See `Peers`."""
        return list(range(self.size))

    def gather(self, value: Any, stage: str = "", step: int | None = None) -> list[Any]:
        """All agree."""
        return [value] * self.size

    def gather_integer(self, value: int, stage: str, step: int | None = None) -> list[int]:
        """All agree."""
        return [value] * self.size

    def connect(self, members: Sequence[int], name: str, device: torch.device) -> Connection | None:
        """See `Peers`."""
        if len(members) == 1:
            return None
        own = members.index(self.rank)
        if tuple(members) in self.nodes and len(self.nodes[0]) > 1:
            # The ranks of a node share answers, which are from all nodes.
            place = {rank: node for node in self.nodes for rank in node}
            group: Any = Group(members, own, self.line, sender=lambda rank, member: place[rank][member])
        else:
            group = Group(members, own, self.line, sender=lambda rank, member: members[member])
        return Connection(group)

"""What a device has learnt of an exchange: at once for kernels that depend on it, and later for the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import CorruptPacket
from thinwire.kernels.header import NONFINITE, RAISED, REFUSED, STATUS_WORDS, Status
from thinwire.kernels.modes import Gate
from thinwire.transport.buffers import WORD_BYTES, Frame
from thinwire.transport.layout import WORD, Layout
from thinwire.transport.memory import HOST
from thinwire.transport.packet import refusal_in

_SLOTS = 2
"""A step is reported before the report of the one before it has been read."""


@dataclass(frozen=True)
class Findings:
    """A report, as the host reads it."""

    flags: int
    refusal: CorruptPacket | None
    present: list[int]
    """The positions of the parameters that have a gradient on some worker."""


class Report:
    """Flags, the first packet that was refused, presence bits of all buckets; and a gate for every parameter, and one
    behind them for the step as a whole.

    Args:
        layout: the flat space.
    """

    def __init__(self, layout: Layout) -> None:
        device, self._parameters = layout.device, len(layout.slots)
        words = [-(-len(bucket.slots) // WORD) for bucket in layout.buckets]
        self._words = torch.zeros(STATUS_WORDS + sum(words), dtype=torch.int64, device=device)
        self.status = self._words[:STATUS_WORDS]
        """Where kernels raise what they find."""
        self._presence = self._words[STATUS_WORDS:].split(words)
        word_of, place_of = [0] * self._parameters, [0] * self._parameters
        first = 0
        for bucket, count in zip(layout.buckets, words, strict=True):
            for place, position in enumerate(bucket.slots):
                word_of[position], place_of[position] = STATUS_WORDS + first + place // WORD, place % WORD
            first += count
        self._where = list(zip(word_of, place_of, strict=True))
        self._word_of = torch.tensor(word_of, dtype=torch.int64, device=device)
        self._place_of = torch.tensor(place_of, dtype=torch.int64, device=device)
        self.gate = Gate(torch.ones(self._parameters + 1, dtype=torch.int32, device=device), self._parameters)
        pinned = device.type == "cuda"
        to = torch.zeros(_SLOTS, self._words.numel(), dtype=torch.int64, device=HOST, pin_memory=pinned)
        self._slots = to.unbind()
        self._next = 0

    def begin(self) -> None:
        """Forget the last exchange, but not a refusal: nothing is applied after one, ever."""
        self.status[Status.FLAGS].bitwise_and_(REFUSED)

    def note_presence(self, frame: Frame) -> None:
        """Take the presence bits of a bucket from its answers."""
        at = slice(frame.down_presence, frame.down_presence + WORD_BYTES * frame.presence_words)
        self._presence[frame.bucket.index].copy_(frame.answers[0, at].view(torch.int64))

    def decide(self) -> None:
        """Open the gates of those who take this step."""
        taken = (self.status[Status.FLAGS] & RAISED) == 0
        present = (self._words[self._word_of] >> self._place_of) & 1
        self.gate.open[: self._parameters] = present * taken
        self.gate.open[self._parameters] = taken

    def allow(self) -> None:
        """Open all gates, as it is the host who decides."""
        self.gate.open.fill_(1)

    def refuse(self) -> None:
        """Raise that a packet was refused for reasons that the host has seen."""
        self.status[Status.FLAGS].bitwise_or_(REFUSED)

    def overflow(self) -> Tensor:
        """1.0 if a gradient was not finite on any rank, else 0.0; on the device."""
        return (self.status[Status.FLAGS] & NONFINITE).to(torch.float32)

    def send(self) -> Tensor:
        """Have the report copied to the host; where to, to be read when the copy is there."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % _SLOTS
        return slot.copy_(self._words, non_blocking=True)

    def read(self, slot: Tensor) -> Findings:
        """What a copy says that is there."""
        words = slot.tolist()
        present = [position for position, (word, place) in enumerate(self._where) if words[word] >> place & 1]
        return Findings(words[Status.FLAGS], refusal_in(words), present)

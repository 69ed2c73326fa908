"""The outcome of an exchange in the memory of a device: for kernels at once, for the host later."""

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
"""The host reads the copy of one step after the next step has begun its own."""


@dataclass(frozen=True)
class Outcome:
    """A report as the host reads it."""

    flags: int
    refusal: CorruptPacket | None
    present: list[int]
    """The positions of the parameters that have a gradient on some worker."""


class Report:
    """Status words (flags, and the first packet that was refused), the presence bits of all buckets, and gates: one per
    parameter, and a last one for the whole step.

    Args:
        layout: the flat space.
    """

    def __init__(self, layout: Layout) -> None:
        device, self._parameters = layout.device, len(layout.slots)
        self._commit = len(layout.buckets)
        words = [-(-len(bucket.slots) // WORD) for bucket in layout.buckets]
        self._words = torch.zeros(STATUS_WORDS + sum(words), dtype=torch.int64, device=device)
        self.status = self._words[:STATUS_WORDS]
        """Kernels write what they find here."""
        self._presence = self._words[STATUS_WORDS:].split(words)
        word_of, bit_of = [0] * self._parameters, [0] * self._parameters
        first = 0
        for bucket, count in zip(layout.buckets, words, strict=True):
            for i, position in enumerate(bucket.slots):
                word_of[position], bit_of[position] = STATUS_WORDS + first + i // WORD, i % WORD
            first += count
        self._bits = list(zip(word_of, bit_of, strict=True))
        self._word_of = torch.tensor(word_of, dtype=torch.int64, device=device)
        self._bit_of = torch.tensor(bit_of, dtype=torch.int64, device=device)
        self.gate = Gate(torch.ones(self._parameters + 1, dtype=torch.int32, device=device), self._parameters)
        pinned = device.type == "cuda"
        copies = torch.zeros(_SLOTS, self._words.numel(), dtype=torch.int64, device=HOST, pin_memory=pinned)
        self._slots = copies.unbind()
        self._next = 0

    def begin(self) -> None:
        """Reset the flags, except REFUSED: after a refusal nothing is ever applied."""
        self.status[Status.FLAGS].bitwise_and_(REFUSED)

    def copy_presence(self, frame: Frame) -> None:
        """Copy the presence bits of a bucket from its answers."""
        at = slice(frame.down_presence, frame.down_presence + WORD_BYTES * frame.presence_words)
        self._presence[frame.bucket.index].copy_(frame.answers[0, at].view(torch.int64))

    def set_gates(self) -> None:
        """Open the gates of the parameters that take this step, and close the others."""
        taken = (self.status[Status.FLAGS] & RAISED) == 0
        present = (self._words[self._word_of] >> self._bit_of) & 1
        self.gate.open[: self._parameters] = present * taken
        self.gate.open[self._parameters] = taken

    def open_gates(self) -> None:
        """Open all gates: the host decides which parameters move."""
        self.gate.open.fill_(1)

    def set_refused(self) -> None:
        """Raise the flag REFUSED for a packet that the host has refused."""
        self.status[Status.FLAGS].bitwise_or_(REFUSED)

    def overflow(self) -> Tensor:
        """1.0 if a gradient was not finite on any rank, else 0.0; on the device."""
        return (self.status[Status.FLAGS] & NONFINITE).to(torch.float32)

    def copy_to_host(self) -> Tensor:
        """Enqueue a copy of the report to the host; the result is for `read`, when the copy is complete."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % _SLOTS
        return slot.copy_(self._words, non_blocking=True)

    def read(self, slot: Tensor) -> Outcome:
        """Read a completed copy."""
        words = slot.tolist()
        present = [position for position, (word, bit) in enumerate(self._bits) if words[word] >> bit & 1]
        return Outcome(words[Status.FLAGS], refusal_in(words, self._commit), present)

"""Messages without a payload: a packet whose payload is all zeros travels as a header and presence bits.

Only on the channels whose compressor asks for it (`Payload.leaves_out_zeros`), and only between ranks: the sender's own
packet and what a receiver makes of such a message are whole packets, with the header and the checksum that the sender
has sealed. What comes before and after a message therefore does not know about it.

A receiver posts a receive for the whole packet. gloo and MPI accept a message that is shorter than that, and gloo ends
the process on a longer one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from thinwire.kernels.header import flags_of
from thinwire.kernels.ops import Kernels
from thinwire.transport.packet import EMPTY, HEADER_BYTES, Header, Packet


class Shortened:
    """The two forms of one packet.

    Args:
        row: the whole packet.
        presence: the byte at which its presence bits begin.
    """

    __slots__ = ("_arrived", "_packet", "_payload", "_presence", "_short", "_short_row", "row")

    def __init__(self, row: Tensor, presence: int) -> None:
        self.row = row
        self._packet = Packet(row)
        self._payload, self._presence = row[HEADER_BYTES:presence].view(torch.int64), row[presence:]
        size = HEADER_BYTES + self._presence.numel()
        self._short_row = torch.zeros(size, dtype=torch.uint8)
        """What is sent in place of the row. It has memory of its own: the row may be read before it has been taken."""
        self._short = Packet(self._short_row)
        self._arrived = Packet(row[:size])
        """What a receiver finds at the start of its row."""

    def message(self, header: Header, kernels: Kernels) -> Tensor:
        """What to send for the row, which is sealed with this header."""
        if bool(self._payload.any()):
            return self.row
        self._short_row[HEADER_BYTES:] = self._presence
        self._of_short(header).seal(self._short, kernels)
        return self._short_row

    def restore(self, header: Header, kernels: Kernels) -> int:
        """Make the received message a whole packet again, if it is not one.

        Args:
            header: that of the whole packet, but for its flags.
            kernels: the backend.

        Returns:
            The number of bytes that have arrived.

        Raises:
            CorruptPacket: if the message says that it has no payload, and its header or checksum is wrong. The row is
                left as it arrived, and is no valid packet.
        """
        if not flags_of(self._packet.memory) & EMPTY:
            return self.row.numel()
        flags = self._of_short(header).check(self._arrived, kernels)
        presence = self._arrived.body[-self._presence.numel() :].clone()
        self._payload.zero_()
        self._presence.copy_(presence)
        replace(header, flags=flags & ~EMPTY).seal(self._packet, kernels)
        return self._short_row.numel()

    def _of_short(self, header: Header) -> Header:
        return replace(header, flags=header.flags | EMPTY, length=self._presence.numel())

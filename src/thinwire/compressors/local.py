"""For local steps: a worker's momentum stays inside its node."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.compressors.dense import Dense
from thinwire.kernels.modes import Output
from thinwire.transport.buffers import Frame, PacketBuffers, Part, Payload
from thinwire.transport.state import State

NOTHING_TRAVELS = Payload(up_words=lambda _: 0, down_words=lambda _: 0, element_bits=0, in_place=True)


class Alone:
    """A worker of one rank. Packets are empty, and the momentum is read in place.

    Args:
        m: the momentum, of the whole flat space.
    """

    payload = NOTHING_TRAVELS
    output = Output.NOTHING

    def __init__(self, m: Tensor) -> None:
        self._values = m.view(torch.uint8)

    def bind(self, buffers: PacketBuffers) -> None:
        """See `Compressor`."""
        self._runs: list[Tensor] = []
        for part in (part for parts in buffers.parts for part in parts):
            runs = part.down_runs.clone()
            runs[:, 3] = torch.float32.itemsize * runs[:, 0]
            self._runs.append(runs)

    def seal(self, frame: Frame) -> None:
        """See `Compressor`."""

    def merge(self, frame: Frame, shard: int) -> None:
        """See `Compressor`."""

    def state(self) -> State:
        """See `Compressor`."""
        return State()

    def momentum(self, part: Part) -> tuple[Tensor, Tensor]:
        """Runs, and the memory in which they find a part's momentum."""
        return self._runs[part.index], self._values


class AmongNode(Dense):
    """A worker of several ranks. Each sends the momentum of its slice to the others."""

    output = Output.MOMENTUM

    def momentum(self, part: Part) -> tuple[Tensor, Tensor]:
        """Runs, and the memory in which they find a part's momentum."""
        return part.down_runs, self.packets

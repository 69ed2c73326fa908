"""Compressors for local steps: a worker's momentum does not leave its node."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from thinwire.compressors.dense import Dense
from thinwire.kernels.modes import Output
from thinwire.kernels.ops import Kernels
from thinwire.transport.buffers import Frame, PacketBuffers, Part, Payload
from thinwire.transport.state import State

NO_PAYLOAD = Payload(up_words=lambda _: 0, down_words=lambda _: 0, word_bytes=0, in_place=True)


class LocalMomentum:
    """The momentum of a worker with one rank. Packets are empty, and the momentum is read in place.

    Args:
        m: the momentum, over the whole flat space.
        block_words: see `Payload`.
    """

    output = Output.NOTHING

    def __init__(self, m: Tensor, block_words: int | None) -> None:
        self.payload = replace(NO_PAYLOAD, block_words=block_words)
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
        """The runs of a part, and the bytes into which they point for its momentum."""
        return self._runs[part.index], self._values


class NodeMomentum(Dense):
    """The momentum of a worker with several ranks. Each rank sends that of its slice to the other ranks of the node.

    Args:
        kernels: the backend.
        block_words: see `Payload`.
    """

    output = Output.MOMENTUM

    def __init__(self, kernels: Kernels, block_words: int | None) -> None:
        super().__init__(kernels)
        self.payload = replace(self.payload, block_words=block_words)

    def momentum(self, part: Part) -> tuple[Tensor, Tensor]:
        """The runs of a part, and the bytes into which they point for its momentum."""
        return self.answer_floats(part)

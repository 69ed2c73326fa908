"""No compression: every element is sent as a float32."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.modes import LARGEST, Scale
from thinwire.kernels.ops import Kernels
from thinwire.transport.buffers import WORD_BYTES, Frame, PacketBuffers, Part, Payload
from thinwire.transport.layout import WORD
from thinwire.transport.packet import HEADER_BYTES
from thinwire.transport.state import State

_FLOAT = torch.float32
_FLOAT_BYTES = _FLOAT.itemsize


def _float_words(shard_words: int) -> int:
    return shard_words * WORD * _FLOAT_BYTES // WORD_BYTES


class Dense:
    """Workers send floats, and owners answer with their mean, in the same memory.

    Args:
        kernels: the backend.
    """

    payload = Payload(
        up_words=_float_words,
        down_words=_float_words,
        word_bytes=WORD * _FLOAT_BYTES,
        in_place=True,
        receive_window=lambda _: 1,  # packets are as large as the gradients
    )

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.packets: Tensor

    def bind(self, buffers: PacketBuffers) -> None:
        """See `Compressor`."""
        self.packets = buffers.sent

    def encode(self, part: Part, grad: Tensor | None, scale: Scale, largest: float = LARGEST) -> bool | None:
        """Write a gradient times `scale`, or zeros, into the packets; whether it is not finite or exceeds `largest`."""
        return self._kernels.dense_encode(part.up_runs, grad, self.packets, scale=scale, largest=largest)

    def answer_floats(self, part: Part) -> tuple[Tensor, Tensor]:
        """The runs of a part, and the bytes into which they point for the floats of its answer."""
        return part.down_runs, self.packets

    def seal(self, frame: Frame) -> None:
        """See `Compressor`."""

    def merge(self, frame: Frame, shard: int) -> None:
        """Answer with the mean. With a single worker, the answer is its packet."""
        if frame.received is not frame.sent:
            floats = slice(HEADER_BYTES, HEADER_BYTES + WORD_BYTES * _float_words(frame.bucket.shard_words))
            rows, answer = (packets[..., floats].view(_FLOAT) for packets in (frame.received, frame.answers[shard]))
            self._kernels.mean(rows, answer)

    def state(self) -> State:
        """See `Compressor`."""
        return State()

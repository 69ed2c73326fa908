"""Quantised averaging for kernels that read floats: answers are decoded one part at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.compressors.quantized import Quantized
from thinwire.transport.buffers import PacketBuffers, Part
from thinwire.transport.layout import WORD
from thinwire.transport.memory import untouched_zeros, zero_and_give_back

_FLOAT = torch.float32


class QuantizedMean(Quantized):
    """As `Quantized`, for update rules that take the mean gradient into their state instead of into `.grad`."""

    def bind(self, buffers: PacketBuffers) -> None:
        """See `Compressor`."""
        super().bind(buffers)
        self._decoding: list[tuple[Callable[[Tensor], None], Tensor]] = []
        """For each part, what decodes its answer into `_floats`, and the runs that point to its floats there."""
        longest = 0
        for part in (part for parts in buffers.parts for part in parts):
            offsets = part.down_runs[:, 1] - part.down_runs[0, 1]
            decoding, decoded = part.down_runs.clone(), part.down_runs.clone()
            decoding[:, 1], decoded[:, 3] = offsets, _FLOAT.itemsize * offsets
            self._decoding.append((self.decoder(decoding, self._answers), decoded))
            longest = max(longest, int(part.down_runs[:, 2].sum()))
        words = -(-longest // WORD)
        self._floats = untouched_zeros(WORD * words, _FLOAT, buffers.layout.device)
        """The answer of one part at a time."""
        self._bytes = self._floats.view(torch.uint8)

    def answer_floats(self, part: Part) -> tuple[Tensor, Tensor]:
        """The runs of a part, and the bytes into which they point for the floats of its answer. The next call
        overwrites them."""
        decode, decoded = self._decoding[part.index]
        decode(self._floats)
        return decoded, self._bytes

    def drop_residuals(self) -> None:
        """Set the residuals to zero, and give their memory back."""
        for residual in (self.residual, self.answer_residual):
            if residual is not None:
                zero_and_give_back(residual)

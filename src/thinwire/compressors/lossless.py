"""Gradients as they are: 32 bits per value, for comparison, and for exchanges that stay inside one node."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compressors.dense import Dense
from thinwire.compressors.gradient_compressor import Scheme
from thinwire.kernels.ops import Kernels
from thinwire.transport.buffers import PacketBuffers, Part
from thinwire.transport.layout import Layout


@dataclass(frozen=True)
class LosslessScheme(Scheme):
    """No compression. The mean is computed in rank order, so its rounding differs from that of DDP's all-reduce."""

    @property
    def worker_residual(self) -> bool:
        """See `Scheme`."""
        return False

    def bits_per_value(self, workers: int) -> tuple[float, float]:
        """See `Scheme`."""
        return 32.0, 32.0

    def bind(self, layout: Layout, node: int, kernels: Kernels) -> Lossless:
        """See `Scheme`."""
        return Lossless(kernels)


class Lossless(Dense):
    """Workers send floats, and owners answer with their mean."""

    def bind(self, buffers: PacketBuffers) -> None:
        """See `Compressor`."""
        super().bind(buffers)
        self._answers = buffers.answers

    def begin_step(self, step: int) -> None:
        """See `GradientCompressor`."""

    def read_answers(self) -> None:
        """See `GradientCompressor`."""

    def decode(self, part: Part, into: Tensor) -> None:
        """See `GradientCompressor`."""
        self.decoder(part.down_runs, self._answers)(into)

    def decoder(self, runs: Tensor, answers: Tensor) -> Callable[[Tensor], None]:
        """See `PlacedAnswers`."""

        def decode(into: Tensor) -> None:
            for _, start, count, byte, *_ in runs.tolist():
                into[start : start + count] = answers[byte : byte + 4 * count].view(torch.float32)

        return decode

    def rescale(self, factor: float) -> None:
        """See `GradientCompressor`."""

    def contraction(self) -> float:
        """See `GradientCompressor`."""
        return 0.0 if self._answers.numel() else math.nan

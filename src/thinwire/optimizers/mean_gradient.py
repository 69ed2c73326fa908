"""The mean gradient in the steps that update a variance: sent as floats, or quantised to a few bits per parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire._checks import is_integer
from thinwire.compressors.dense import Dense
from thinwire.compressors.quantized import QuantizedScheme
from thinwire.compressors.quantized_mean import QuantizedMean
from thinwire.kernels.modes import Scale
from thinwire.optimizers.adam import DENSE, SQUARABLE
from thinwire.optimizers.rule import Context
from thinwire.transport.buffers import Part
from thinwire.transport.state import State


def check_warmup_bits(bits: int | None) -> None:
    """Reject a number of bits that no warm-up has.

    Raises:
        ValueError: naming the argument.
    """
    if bits is not None and not (is_integer(bits, 4, 8) and bits in (4, 8)):
        raise ValueError(f"warmup_bits={bits!r}: expected 4 or 8 bits per parameter, or None for 32")


class MeanGradient:
    """Sends gradients on the channel DENSE, and reads their mean.

    With a single worker nothing is quantised.

    Args:
        context: the run.
        state: where the residuals are registered.
        bits: of an element in packets; None for 32.
        error_dtype: the dtype of the residuals.
    """

    def __init__(self, context: Context, state: State, bits: int | None, error_dtype: torch.dtype) -> None:
        self._context = context
        self.compressor: Dense | QuantizedMean
        if bits is None or context.topology.workers == 1:
            self.compressor = Dense(context.kernels)
        else:
            scheme = QuantizedScheme(bits, residual_dtype=error_dtype)
            self.compressor = QuantizedMean(scheme, context.layout, context.topology.node, context.kernels)
        state.include(self.compressor.state())

    def encode(self, part: Part, grad: Tensor | None, scale: Scale) -> bool | None:
        """Write a gradient times `scale` into the packets; whether it is not finite, or too large to be squared."""
        if isinstance(self.compressor, QuantizedMean):
            return self.compressor.encode(part, grad, scale)  # the limit of its kernel is SQUARABLE
        return self.compressor.encode(part, grad, scale, SQUARABLE)

    def floats(self, part: Part) -> tuple[Tensor, Tensor]:
        """The runs of a part, and the bytes into which they point for its mean. Valid until the next call."""
        return self.compressor.answer_floats(part)

    def residuals(self) -> State:
        """What workers and owners have not sent yet."""
        return self.compressor.state()

    def release(self) -> None:
        """Free packets and residuals after the last such step. A state that is loaded may bring them back."""
        channel = self._context.session.channels[DENSE]
        if not channel.released:
            channel.release()
            if isinstance(self.compressor, QuantizedMean):
                self.compressor.drop_residuals()

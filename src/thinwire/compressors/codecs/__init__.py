"""How a vector becomes bytes, and bytes a vector: one module a codec.

A codec knows nothing of workers, buckets or packets. `thinwire.compressors` says who encodes what, and remembers what
an encoding has left out.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from thinwire.kernels.bounds import need


class Codec(abc.ABC):
    """Writes vectors of float32 as bytes, and reads them back as well as that goes."""

    adds = False
    """Whether the sum of encodings is the encoding of the sum; see `AddingCodec`."""

    @abc.abstractmethod
    def nbytes(self, length: int) -> int:
        """How many bytes a vector of `length` elements takes; a multiple of 8."""

    @abc.abstractmethod
    def encode(self, values: Tensor, packet: Tensor) -> None:
        """Write a vector into `packet`, a uint8 tensor of `nbytes(len(values))` bytes at a multiple of 8.

        Raises:
            TypeError: when `values` is not float32, or `packet` not uint8.
            ValueError: when either is not a contiguous row, is on another device than the other, or has torch's
                negative bit, or when the packet has another size.
        """

    @abc.abstractmethod
    def decode(self, packet: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """Add to `values` what a packet says, times `weight`.

        Raises:
            TypeError: as `encode`.
            ValueError: as `encode`, and when no encoding looks like that packet.
        """

    def _check(self, values: Tensor, packet: Tensor) -> None:
        """Kernels walk memory, and not all backends by what torch knows of it."""
        name, size = type(self).__name__, self.nbytes(values.numel())
        need(name, "packet", packet, torch.uint8, 0, packet.device if values.is_meta else values.device)
        need(name, "values", values, torch.float32, 0, packet.device)
        if values.dim() != 1:
            raise ValueError(f"{name}: values has the shape {tuple(values.shape)}: expected a row of elements")
        if packet.shape != (size,):
            raise ValueError(
                f"{name}: packet has the shape {tuple(packet.shape)}: expected a row of {size} bytes, for "
                f"{values.numel()} elements"
            )


class Projection(Codec):
    """One whose rest, what it leaves out, is orthogonal to what it says: the more it says the less is left."""

    @abc.abstractmethod
    def square_sum(self, packet: Tensor, length: int) -> float:
        """The square of the norm of what the packet of a vector of `length` elements says."""


class AddingCodec(Codec):
    """One whose encodings are float32 numbers that may be summed, by whoever and without decoding them."""

    adds = True

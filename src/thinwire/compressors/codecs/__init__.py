"""Codecs turn a vector into bytes and back: one module per codec.

A codec does not depend on workers, buckets or headers. `thinwire.compressors` decides which rank encodes what, and
keeps the residuals.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from thinwire.kernels.bounds import need


class Codec(abc.ABC):
    """Encodes vectors of float32 as bytes, and decodes them, exactly or approximately."""

    adds = False
    """Whether the sum of two encodings is the encoding of the sum; see `AddingCodec`."""

    @abc.abstractmethod
    def nbytes(self, length: int) -> int:
        """The number of bytes for a vector of `length` elements; a multiple of 8."""

    @abc.abstractmethod
    def encode(self, values: Tensor, packet: Tensor) -> None:
        """Encode a vector into `packet`, a uint8 tensor of `nbytes(len(values))` bytes, aligned to 8 bytes.

        Raises:
            TypeError: if `values` is not float32, or `packet` is not uint8.
            ValueError: if either is not one-dimensional and contiguous, or has torch's negative bit; if they are on
                different devices; if the packet does not have `nbytes(len(values))` bytes.
        """

    @abc.abstractmethod
    def decode(self, packet: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """Add the decoded vector, times `weight`, to `values`.

        Raises:
            TypeError: as `encode`.
            ValueError: as `encode`, and if the packet is not a valid encoding.
        """

    def _check(self, values: Tensor, packet: Tensor) -> None:
        """Validate both tensors, because kernels access memory directly and not every backend checks its bounds."""
        name, size = type(self).__name__, self.nbytes(values.numel())
        need(name, "packet", packet, torch.uint8, 0, packet.device if values.is_meta else values.device)
        need(name, "values", values, torch.float32, 0, packet.device)
        if values.dim() != 1:
            raise ValueError(f"{name}: values has the shape {tuple(values.shape)}: expected one dimension")
        if packet.shape != (size,):
            raise ValueError(
                f"{name}: packet has the shape {tuple(packet.shape)}: expected one dimension of {size} bytes, for "
                f"{values.numel()} elements"
            )


class Projection(Codec):
    """A codec whose error is orthogonal to the decoded vector: ‖error‖² = ‖values‖² - ‖decoded‖²."""

    @abc.abstractmethod
    def square_sum(self, packet: Tensor, length: int) -> float:
        """The squared norm of the decoded vector of `length` elements."""


class AddingCodec(Codec):
    """A codec whose encodings are float32 numbers that can be summed without decoding them."""

    adds = True


class RandomCodec(Codec):
    """A codec with random numbers. They depend on keys and on indices only, not on the order of calls."""

    _own_key = 0
    _shared_key = 0

    def use_keys(self, own: int, shared: int) -> None:
        """Set the keys for the next vectors, encoded or decoded.

        Args:
            own: differs between the senders of a vector; see `thinwire.kernels.rng`.
            shared: the same for all senders and receivers of a vector.
        """
        self._own_key, self._shared_key = own, shared

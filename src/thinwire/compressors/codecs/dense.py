"""No compression: each element is stored as a float32."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.compressors.codecs import AddingCodec


class Floats(AddingCodec):
    """Four bytes per element, lossless."""

    def nbytes(self, length: int) -> int:
        """See `Codec`."""
        return 8 * -(-length * torch.float32.itemsize // 8)

    def encode(self, values: Tensor, packet: Tensor) -> None:
        """See `Codec`."""
        self._check(values, packet)
        packet.view(torch.float32)[: values.numel()] = values

    def decode(self, packet: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """See `Codec`."""
        self._check(values, packet)
        values.add_(packet.view(torch.float32)[: values.numel()], alpha=weight)

"""Packets of some entries per chunk of 4,096: a scale, indices of 12 bits, and small codes."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.compressors.codecs._blocks import block_count, whole_words

CHUNK = 4096
INDEX_BITS = 12
SCALE_BITS = 32


class Entries:
    """One float32 scale per chunk, then the indices of all chunks, two in three bytes, then the codes.

    Args:
        k: the number of entries per chunk; its codes and indices fill whole bytes.
        code_bits: of an entry.
    """

    def __init__(self, k: int, code_bits: int) -> None:
        self.k, self._code_bits = k, code_bits

    def nbytes(self, length: int) -> int:
        """See `Codec`."""
        chunks = block_count(length, CHUNK)
        return whole_words(chunks * (SCALE_BITS + self.k * (INDEX_BITS + self._code_bits)) // 8)

    def sections(self, packet: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """The scales of a packet, and the bytes of its indices and codes."""
        chunks = block_count(length, CHUNK)
        scales, indices = chunks * SCALE_BITS // 8, chunks * self.k * INDEX_BITS // 8
        codes = chunks * self.k * self._code_bits // 8
        return (
            packet[:scales].view(torch.float32),
            packet[scales : scales + indices],
            packet[scales + indices : scales + indices + codes],
        )


def bits_per_value(k: int, code_bits: int) -> float:
    """Of a long vector."""
    return (k * (INDEX_BITS + code_bits) + SCALE_BITS) / CHUNK

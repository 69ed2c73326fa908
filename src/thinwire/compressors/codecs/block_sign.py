"""Signs of blocks: one bit per element, and one or two float32 numbers per block that the signs stand for.

A packet has the numbers of all blocks, and then the bits, 1 for elements that are not negative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire._checks import is_integer
from thinwire.compressors.codecs import Codec, RandomCodec
from thinwire.compressors.codecs._blocks import (
    Sections,
    block_lengths,
    in_blocks,
    pack,
    packed_bytes,
    pieces,
    unpack,
    whole_words,
)
from thinwire.kernels import rng

MAX_BLOCK = 1 << 20


def check_block(block: int) -> None:
    """Reject a block that has too few or too many elements.

    Raises:
        ValueError: naming the argument.
    """
    if not is_integer(block, 8, MAX_BLOCK):
        raise ValueError(f"block={block!r}: expected an integer from 8 to 2**20, the elements that share a scale")


class BlockSign(Codec):
    """Each element becomes its sign times the mean magnitude of its block, which minimizes the error.

    Args:
        block: the number of elements that share a scale.

    Raises:
        ValueError: if `block` is out of range.
    """

    def __init__(self, block: int) -> None:
        check_block(block)
        self._block = block
        self._sections = Sections(block, 1, 1)

    def nbytes(self, length: int) -> int:
        """See `Codec`."""
        return self._sections.nbytes(length)

    def encode(self, values: Tensor, packet: Tensor) -> None:
        """See `Codec`."""
        self._check(values, packet)
        for _, scales, bits, piece in self._sections.pieces(packet, values):
            sizes = in_blocks(piece.abs(), self._block).sum(1)
            torch.div(sizes, block_lengths(piece.numel(), self._block, values.device), out=scales[:, 0])
            pack((piece >= 0).view(torch.uint8), 1, bits)

    def decode(self, packet: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """See `Codec`."""
        self._check(values, packet)
        for _, scales, bits, piece in self._sections.pieces(packet, values):
            signs = unpack(bits, 1, piece.numel()).to(torch.float32).mul_(2.0).sub_(1.0)
            decoded = in_blocks(signs, self._block) * scales
            piece.add_(decoded.view(-1)[: piece.numel()], alpha=weight)


class HalfMeans(Codec):
    """Each element becomes the mean of the elements of its block that have its sign, which minimizes the error.

    Args:
        block: the number of elements that share the two means.

    Raises:
        ValueError: if `block` is out of range.
    """

    def __init__(self, block: int) -> None:
        check_block(block)
        self._block = block
        self._sections = Sections(block, 2, 1)

    def nbytes(self, length: int) -> int:
        """See `Codec`."""
        return self._sections.nbytes(length)

    def encode(self, values: Tensor, packet: Tensor) -> None:
        """See `Codec`."""
        self._check(values, packet)
        for _, means, bits, piece in self._sections.pieces(packet, values):
            positive = piece >= 0
            counts = in_blocks(positive.to(torch.float32), self._block).sum(1)
            others = block_lengths(piece.numel(), self._block, values.device) - counts
            means[:, 0] = in_blocks(piece.clamp(max=0.0), self._block).sum(1) / others.clamp_(min=1.0)
            means[:, 1] = in_blocks(piece.clamp(min=0.0), self._block).sum(1) / counts.clamp_(min=1.0)
            pack(positive.view(torch.uint8), 1, bits)

    def decode(self, packet: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """See `Codec`."""
        self._check(values, packet)
        for _, means, bits, piece in self._sections.pieces(packet, values):
            positive = in_blocks(unpack(bits, 1, piece.numel()).to(torch.float32), self._block)
            decoded = positive * means[:, 1:]  # products with 0 and 1 are exact, and faster than torch.where
            decoded += positive.neg_().add_(1.0).mul_(means[:, :1])
            piece.add_(decoded.view(-1)[: piece.numel()], alpha=weight)


class FixedSign(RandomCodec):
    """Each element becomes `±scale`. The sign of zero is random.

    Args:
        scale: the same for all vectors.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale

    def nbytes(self, length: int) -> int:
        """See `Codec`."""
        return whole_words(packed_bytes(length, 1))

    def encode(self, values: Tensor, packet: Tensor) -> None:
        """See `Codec`."""
        self._check(values, packet)
        positive = values > 0
        zeros = (values == 0).nonzero().view(-1)
        positive[zeros] = rng.draw(self._own_key, zeros) >= 1 << 31
        pack(positive.view(torch.uint8), 1, packet[: packed_bytes(values.numel(), 1)])

    def decode(self, packet: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """See `Codec`."""
        self._check(values, packet)
        for first, last in pieces(values.numel()):
            bits = unpack(packet[first // 8 : packed_bytes(last, 1)], 1, last - first)
            values[first:last].add_(bits.to(torch.float32).mul_(2.0).sub_(1.0), alpha=weight * self._scale)

"""Packs flags, one byte each, into bits and back. For small numbers of flags; kernels pack those of elements."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from thinwire.transport.layout import WORD


@functools.cache
def bit_positions(device: torch.device) -> Tensor:
    """The positions 0 to 7 of the bits of a byte. Make the first call on the stream that all others wait for."""
    return torch.arange(8, dtype=torch.uint8, device=device)


def words_for(flags: int) -> int:
    """The number of words that hold `flags` flags."""
    return -(-flags // WORD)


def pack(flags: Tensor, into: Tensor) -> None:
    """Write flags into the bytes of whole words, flag `i` at bit `i` (little endian), and zeros after the last."""
    padded = torch.zeros(into.numel(), 8, dtype=torch.uint8, device=into.device)
    padded.view(-1)[: flags.numel()] = flags
    torch.sum(padded << bit_positions(into.device), 1, dtype=torch.uint8, out=into)


def unpack(bits: Tensor, flags: int) -> Tensor:
    """The first `flags` flags, as bools. The bytes are the last dimension of `bits`."""
    spread = bits.unsqueeze(-1).bitwise_right_shift(bit_positions(bits.device)).bitwise_and_(1)
    return spread.flatten(-2)[..., :flags].to(torch.bool)

"""Flags of bytes, 0 or 1, to bits and back; for a few of them, as kernels pack those of elements."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from thinwire.transport.layout import WORD


@functools.cache
def places(device: torch.device) -> Tensor:
    """Of the bits of a byte. To be asked for once on the stream that all others wait for."""
    return torch.arange(8, dtype=torch.uint8, device=device)


def words_for(flags: int) -> int:
    """How many words so many flags take."""
    return -(-flags // WORD)


def pack(flags: Tensor, into: Tensor) -> None:
    """Write flags into the bytes of whole words, flag `i` at bit `i` (little endian), and zeros behind the last."""
    room = torch.zeros(into.numel(), 8, dtype=torch.uint8, device=into.device)
    room.view(-1)[: flags.numel()] = flags
    torch.sum(room << places(into.device), 1, dtype=torch.uint8, out=into)


def unpack(bits: Tensor, flags: int) -> Tensor:
    """The first `flags` flags of bytes in the last dimension, as bools."""
    spread = bits.unsqueeze(-1).bitwise_right_shift(places(bits.device)).bitwise_and_(1)
    return spread.flatten(-2)[..., :flags].to(torch.bool)

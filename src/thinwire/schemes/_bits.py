"""Flags of bytes, 0 or 1, to bits and back; for a few of them, as kernels pack those of elements."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.wire.buckets import WORD

_PLACES = torch.arange(8, dtype=torch.uint8)


def words_for(flags: int) -> int:
    """How many words so many flags take."""
    return -(-flags // WORD)


def pack(flags: Tensor, into: Tensor) -> None:
    """Write flags into the bytes of whole words, flag `i` at bit `i` (little endian), and zeros behind the last."""
    room = torch.zeros(into.numel(), 8, dtype=torch.uint8)
    room.view(-1)[: flags.numel()] = flags
    torch.sum(room << _PLACES, 1, dtype=torch.uint8, out=into)


def unpack(bits: Tensor, flags: int) -> Tensor:
    """The first `flags` flags of bytes in the last dimension, as bools."""
    spread = bits.unsqueeze(-1).bitwise_right_shift(_PLACES).bitwise_and_(1)
    return spread.flatten(-2)[..., :flags].to(torch.bool)

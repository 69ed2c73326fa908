"""Stochastic levels: each element becomes a multiple of its block's norm divided by the number of levels.

A packet has one float32 norm per block, and then the codes of all elements, packed.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from thinwire._checks import is_integer
from thinwire.compressors.codecs import RandomCodec
from thinwire.compressors.codecs._blocks import Sections, in_blocks, pack, unpack
from thinwire.kernels import rng

Norm = Literal["max", "l2"]
NORM_BITS = 32
MAX_LEVELS = 127
MAX_BLOCK = 1 << 20


def check_levels(levels: int, block: int, norm: str) -> None:
    """Reject invalid options of `Levels`.

    Raises:
        ValueError: naming the argument.
    """
    if not is_integer(levels, 1, MAX_LEVELS):
        raise ValueError(f"levels={levels!r}: expected an integer from 1 to {MAX_LEVELS}, the levels of each sign")
    if not is_integer(block, 8, MAX_BLOCK):
        raise ValueError(f"block={block!r}: expected an integer from 8 to 2**20, the elements that share a norm")
    if norm not in get_args(Norm):
        raise ValueError(f"norm={norm!r}: expected 'max' or 'l2'")


def code_bits(levels: int) -> int:
    """The bits of a code: 2, 4 or 8, so that bytes hold whole codes."""
    return next(bits for bits in (2, 4, 8) if 2 * levels < 1 << bits)


class Levels(RandomCodec):
    """Rounds each element to one of `2·levels + 1` multiples of norm/levels, up or down at random: E[decoded] = values.

    With the norm N of a block, an element lies between two neighbouring multiples of N/levels. The probability of the
    upper one is the element's distance from the lower one in units of N/levels, to within 2^-24.

    Args:
        levels: the number of levels of each sign.
        block: the number of elements that share a norm.
        norm: the largest magnitude, or the Euclidean norm.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(self, levels: int, block: int, norm: Norm) -> None:
        check_levels(levels, block, norm)
        self._levels, self._block, self._norm = levels, block, norm
        self._width = code_bits(levels)
        self._sections = Sections(block, 1, self._width)

    def nbytes(self, length: int) -> int:
        """See `Codec`."""
        return self._sections.nbytes(length)

    def encode(self, values: Tensor, packet: Tensor) -> None:
        """See `Codec`."""
        self._check(values, packet)
        for first, norms, packed, piece in self._sections.pieces(packet, values):
            sizes = in_blocks(piece.abs(), self._block)
            if self._norm == "max":
                torch.amax(sizes, 1, keepdim=True, out=norms)
            else:
                torch.linalg.vector_norm(sizes, dim=1, keepdim=True, out=norms)
            exact = sizes.div_(torch.where(norms > 0, norms, 1.0)).mul_(self._levels).view(-1)[: piece.numel()]
            lower = exact.floor()
            up = rng.fractions(self._own_key, first, first + piece.numel(), values.device) < exact.sub_(lower)
            levels = lower.add_(up).clamp_(max=self._levels)
            pack(levels.copysign_(piece).add_(self._levels).to(torch.uint8), self._width, packed)

    def decode(self, packet: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """See `Codec`."""
        self._check(values, packet)
        for *_, packed, piece in self._sections.pieces(packet, values):
            if bool((unpack(packed, self._width, piece.numel()) > 2 * self._levels).any()):
                raise ValueError(f"a packet of {self._levels} levels has a code above {2 * self._levels}")
        for _, norms, packed, piece in self._sections.pieces(packet, values):
            codes = unpack(packed, self._width, piece.numel()).to(torch.float32)
            decoded = in_blocks(codes.sub_(self._levels), self._block) * (norms / self._levels)
            piece.add_(decoded.view(-1)[: piece.numel()], alpha=weight)

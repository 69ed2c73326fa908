"""Chunked top-k: the largest elements of each chunk of 4,096, with indices of 12 bits and values of 2 bits.

A packet has one float32 scale per chunk, then the indices of all chunks, two in three bytes, and then the values, four
in a byte. A value is `±scale` or `±scale/3`: the high bit is the sign, and the low bit the larger magnitude. Indices
ascend within a chunk. An entry that repeats the index before it is empty, so a chunk can have fewer entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire._checks import is_integer
from thinwire.compressors.codecs import Codec
from thinwire.compressors.codecs._blocks import in_blocks, pack, pack_twelve_bits, unpack, unpack_twelve_bits
from thinwire.compressors.codecs._entries import CHUNK, INDEX_BITS, Entries

VALUE_BITS = 2
_SMALL = 1 / 3


def check_entries(k: int) -> None:
    """Reject a number of entries per chunk that cannot be packed.

    Raises:
        ValueError: naming the argument.
    """
    if not is_integer(k, 4, CHUNK) or k % 4:
        raise ValueError(f"k={k!r}: expected a multiple of 4 from 4 to {CHUNK}, the elements sent of each {CHUNK}")


class ChunkedTopK(Codec):
    """The k largest elements of each chunk, except those below a sixth of the largest one; among equal ones, the first.

    The scale minimizes the error of the chunk, so the error is orthogonal to what is decoded. At least the fraction
    0.64/(1 + (k - 1)/36)·k/4096 of the squared norm is sent.

    Args:
        k: the number of entries per chunk, a multiple of 4.

    Raises:
        ValueError: if `k` is out of range.
    """

    def __init__(self, k: int) -> None:
        check_entries(k)
        self._k, self._entries = k, Entries(k, VALUE_BITS)

    def nbytes(self, length: int) -> int:
        """See `Codec`."""
        return self._entries.nbytes(length)

    def encode(self, values: Tensor, packet: Tensor) -> None:
        """See `Codec`."""
        self._check(values, packet)
        scales, packed_indices, packed_codes = self._entries.sections(packet, values.numel())
        chunks = in_blocks(values, CHUNK)
        # The bits of a magnitude are ordered as the magnitude is. Below them, the index makes equal ones differ: the
        # means of packets have many.
        within = torch.arange(CHUNK - 1, -1, -1, device=values.device)
        keys = chunks.view(torch.int32).bitwise_and(0x7FFFFFFF).to(torch.int64).bitwise_left_shift_(INDEX_BITS)
        largest_keys = keys.bitwise_or_(within).topk(self._k, dim=1, sorted=False).values
        indices = (CHUNK - 1) - (largest_keys & CHUNK - 1)
        entries = chunks.gather(1, indices)
        sizes = entries.abs()
        largest = sizes.amax(1, keepdim=True)
        kept = sizes > largest / 6
        high = sizes > largest * (2 / 3)
        weights = torch.where(high, 1.0, _SMALL) * kept
        torch.div((sizes * weights).sum(1), (weights * weights).sum(1).clamp_(min=_SMALL**2), out=scales)
        # Empty entries repeat the last index, and come after it.
        last = torch.where(kept, indices, 0).amax(1, keepdim=True)
        order, by_index = (2 * torch.where(kept, indices, last) + ~kept).sort(dim=1)
        codes = (high + 2 * (entries < 0)).gather(1, by_index)
        pack_twelve_bits((order >> 1).view(-1), packed_indices)
        pack(codes.to(torch.uint8).view(-1), VALUE_BITS, packed_codes)

    def decode(self, packet: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """See `Codec`."""
        self._check(values, packet)
        scales, packed_indices, packed_codes = self._entries.sections(packet, values.numel())
        chunks, length = scales.numel(), values.numel()
        indices = unpack_twelve_bits(packed_indices).view(chunks, self._k)
        steps = indices.diff(dim=1)
        places = indices + CHUNK * torch.arange(chunks, device=values.device)[:, None]
        if bool((steps < 0).any()) or bool((places >= length).any()):
            raise ValueError(f"a packet of chunked top-k has indices out of order or beyond its {length} elements")
        codes = unpack(packed_codes, VALUE_BITS, chunks * self._k).view(chunks, self._k)
        amounts = torch.where(codes & 1 != 0, scales[:, None], scales[:, None] * _SMALL)
        amounts = torch.where(codes & 2 != 0, -amounts, amounts)
        amounts[:, 1:].masked_fill_(steps == 0, 0.0)
        values.index_add_(0, places.view(-1), amounts.view(-1), alpha=weight)

"""The elements of each shard that belong to no parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.transport.layout import Layout


def padding_of(layout: Layout) -> list[Tensor]:
    """For each shard of the model, the indices of its padding, counted from the start of the shard."""
    gaps: list[list[tuple[int, int]]] = [[] for _ in range(layout.shards)]
    filled = [0] * layout.shards
    for slot in layout.slots:
        for piece in layout.pieces(slot):
            bucket = layout.buckets[piece.bucket]
            number = bucket.shard_number(piece.shard)
            first = bucket.start + piece.shard * bucket.shard_elements
            gaps[number].append((filled[number], piece.start - first))
            filled[number] = piece.stop - first
    for bucket in layout.buckets:
        for shard in range(bucket.shards):
            number = bucket.shard_number(shard)
            gaps[number].append((filled[number], bucket.shard_elements))
    return [_indices(ranges, layout.device) for ranges in gaps]


def _indices(ranges: list[tuple[int, int]], device: torch.device) -> Tensor:
    ranged = [torch.arange(start, stop, device=device) for start, stop in ranges if start < stop]
    return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *ranged])

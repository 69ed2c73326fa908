"""What schemes need to know of packets: how codecs fill them, and the runs of the shards that a rank answers for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thinwire.wire.buckets import WORD, Layout
from thinwire.wire.mail import WORD_BYTES, Payload
from thinwire.wire.packet import HEADER_BYTES


def payload_of(nbytes: Callable[[int], int]) -> Payload:
    """What packets carry when a codec that takes `nbytes(elements)` bytes fills them, up and down."""

    def words(shard_words: int) -> int:
        return nbytes(WORD * shard_words) // WORD_BYTES

    return Payload(up_words=words, down_words=words)


class OwnedRuns:
    """For every bucket a table of runs of the shard that this rank owns, whose bytes count from a packet's beginning.

    Args:
        layout: the flat space.
        node: this rank's worker.
    """

    def __init__(self, layout: Layout, node: int) -> None:
        self.shards = layout.owned_by(node)
        self.size = layout.held_size(self.shards)
        """How many elements a memory of all owned shards has."""
        self.positions: list[list[int]] = [[] for _ in layout.buckets]
        """Of the parameters whose runs these are."""
        self.lengths = [0] * layout.shards
        """How many elements every shard of the model has, owned or not, without padding."""
        runs: list[list[list[int]]] = [[] for _ in layout.buckets]
        for position, slot in enumerate(layout.slots):
            for piece in layout.pieces(slot):
                bucket = layout.buckets[piece.bucket]
                number = bucket.shard_number(piece.shard)
                self.lengths[number] += piece.stop - piece.start
                if piece.shard in self.shards:
                    first = bucket.start + piece.shard * bucket.shard_elements
                    byte = HEADER_BYTES + (piece.start - first) // 8
                    runs[bucket.index].append([piece.start, 0, piece.stop - piece.start, byte, 0, number])
                    self.positions[bucket.index].append(position)
        self.tables = [torch.tensor(of_bucket, dtype=torch.int64).view(-1, 6) for of_bucket in runs]

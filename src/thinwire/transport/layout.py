"""The flat space: where every parameter lies, and how the space is cut into buckets and shards.

The layout depends on shapes, their order and the topology only, so every rank computes the same one, and unlike DDP's
buckets it never changes. Parameters stand in reverse order, because backward finishes the last one first.

A bucket is cut into as many *slices* as a node has ranks, of which a rank works on its own, and a slice into as many
*shards* as there are nodes, each owned by one of the ranks that work on that slice. In a flat topology every rank is a
node, and its slice is the whole bucket.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 64
"""Elements to a word of bits, and the alignment of every parameter."""

MAX_ELEMENTS = 1 << 37
"""Beyond this the counters of the owners' random numbers would need more than 32 bits."""


_ELEMENTS_PER_MB = 2**20 // 4


@dataclass(frozen=True)
class Slot:
    """One parameter's place: its number among the parameters, its first element, and how many there are."""

    index: int
    start: int
    numel: int

    @property
    def stop(self) -> int:
        """Where the next parameter may start."""
        return self.start + -(-self.numel // WORD) * WORD


@dataclass(frozen=True)
class Bucket:
    """A stretch of the flat space that is exchanged at once, in words; `shards` shards of `shard_words` words."""

    index: int
    first_word: int
    shard_words: int
    shards: int
    own_shards: range
    """The shards of the slice that this rank works on."""
    slots: range
    """Positions, in flat order, of the parameters that reach into it."""

    @property
    def start(self) -> int:
        """Its first element."""
        return self.first_word * WORD

    @property
    def stop(self) -> int:
        """The element after its last."""
        return self.start + self.shards * self.shard_elements

    @property
    def slices(self) -> int:
        """Into how many it is cut."""
        return self.shards // len(self.own_shards)

    @property
    def shard_elements(self) -> int:
        """The length of a shard."""
        return self.shard_words * WORD

    @property
    def slice_elements(self) -> int:
        """The length of a slice."""
        return len(self.own_shards) * self.shard_elements

    @property
    def own_start(self) -> int:
        """The first element of this rank's slice."""
        return self.start + self.own_shards.start * self.shard_elements

    def shard_number(self, shard: int) -> int:
        """The number of one of its shards among those of all buckets, which all have equally many."""
        return self.index * self.shards + shard

    def shift_of(self, held: range) -> int:
        """How far elements stand before their place in the flat space, in a state that has nothing but the shards
        `held` of every bucket, one after another."""
        return self.start + held.start * self.shard_elements - self.start * len(held) // self.shards

    @property
    def state_shift(self) -> int:
        """The same for a state of this rank's slices."""
        return self.shift_of(self.own_shards)


@dataclass(frozen=True)
class Piece:
    """A part of a parameter that lies within one shard of one bucket, in elements of the flat space."""

    bucket: int
    shard: int
    start: int
    stop: int


class Layout:
    """The flat space of some parameters for `workers` nodes.

    Args:
        numels: the size of each parameter, in the optimizer's order.
        workers: how many shards a slice of a bucket is cut into.
        bucket_elements: the size of a bucket; rounded up so that shards are whole words.
        slices: how many slices a bucket is cut into.
        own_slice: the one that this rank works on.
        device: where everything is that has an element for each of its own.
    """

    def __init__(
        self,
        numels: Sequence[int],
        workers: int,
        bucket_elements: int,
        *,
        slices: int = 1,
        own_slice: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.workers = workers
        self.slices = slices
        self._own_shards = range(own_slice * workers, (own_slice + 1) * workers)
        self.slots: list[Slot] = []
        start = 0
        for index in reversed(range(len(numels))):
            slot = Slot(index, start, numels[index])
            self.slots.append(slot)
            start = slot.stop
        if start > MAX_ELEMENTS:
            raise ValueError(
                f"{start} elements: thinwire's random numbers serve at most {MAX_ELEMENTS} parameters a model"
            )
        self.buckets = self._cut(start // WORD, max(1, -(-bucket_elements // (WORD * workers * slices))))
        self.size = self.buckets[-1].stop if self.buckets else 0
        self.own_size = self.size // slices
        """How many elements of the flat space are this rank's to work on."""
        self.fingerprint = zlib.crc32(repr((list(numels), workers, slices, bucket_elements)).encode())

    def _cut(self, words: int, shard_words: int) -> list[Bucket]:
        buckets: list[Bucket] = []
        shards = self.workers * self.slices
        first = 0
        while first < words:
            left = -(-(words - first) // shards)
            length = min(shard_words, left)
            stop = first + length * shards
            inside = [
                position
                for position, slot in enumerate(self.slots)
                if slot.start < stop * WORD and slot.stop > first * WORD
            ]
            slots = range(inside[0], inside[-1] + 1)
            buckets.append(Bucket(len(buckets), first, length, shards, self._own_shards, slots))
            first = stop
        return buckets

    def pieces(self, slot: Slot) -> Iterator[Piece]:
        """The pieces of a parameter, in order; together they cover it exactly once."""
        for bucket in self.buckets:
            if bucket.stop <= slot.start or bucket.start >= slot.start + slot.numel:
                continue
            for shard in range(bucket.shards):
                first = bucket.start + shard * bucket.shard_elements
                start = max(first, slot.start)
                stop = min(first + bucket.shard_elements, slot.start + slot.numel)
                if start < stop:
                    yield Piece(bucket.index, shard, start, stop)

    def view(self, flat: Tensor, slot: Slot, like: Tensor) -> Tensor:
        """The part of a flat tensor that belongs to a parameter, in the shape and memory order of `like`."""
        stride = like.stride() if is_dense(like) else torch.empty(like.shape, device="meta").stride()
        return flat.as_strided(like.shape, stride, flat.storage_offset() + slot.start)

    def own_view(self, own: Tensor, slot: Slot, like: Tensor) -> Tensor:
        """The part of a state of this rank's slices that belongs to a parameter: shaped like it if there is but one
        slice, else a vector of those elements that this rank works on."""
        return self.view(own, slot, like) if self.slices == 1 else self.held_view(own, slot, self._own_shards)

    def own_words_view(self, words: Tensor, slot: Slot) -> Tensor:
        """The part of the words of this rank's slices that belongs to a parameter."""
        start, stop = self._held_range(slot, self._own_shards)
        return words[start // WORD : -(-stop // WORD)]

    def held_view(self, state: Tensor, slot: Slot, held: range) -> Tensor:
        """The part of a state of the shards `held` of every bucket that belongs to a parameter, as a vector."""
        return state[slice(*self._held_range(slot, held))]

    def _held_range(self, slot: Slot, held: range) -> tuple[int, int]:
        inside = [
            (piece.start - shift, piece.stop - shift)
            for piece in self.pieces(slot)
            if piece.shard in held
            for shift in (self.buckets[piece.bucket].shift_of(held),)
        ]
        # Pieces of one parameter follow each other in it without a gap: where one bucket's part ends the next begins.
        return (inside[0][0], inside[-1][1]) if inside else (0, 0)

    def shard_view(self, table: Tensor, slot: Slot) -> Tensor:
        """The entries of the shards that a parameter reaches into, of a table that has one for every shard."""
        numbers = [self.buckets[piece.bucket].shard_number(piece.shard) for piece in self.pieces(slot)]
        return table[numbers[0] : numbers[-1] + 1] if numbers else table[:0]

    def owned_by(self, node: int) -> range:
        """The shard of every bucket that a rank of worker `node` answers for; it is the same one of each."""
        own = self._own_shards[node]
        return range(own, own + 1)

    def held_size(self, held: range) -> int:
        """How many elements the shards `held` of every bucket have together."""
        return self.size * len(held) // (self.workers * self.slices)

    @property
    def shards(self) -> int:
        """How many shards all buckets have together."""
        return len(self.buckets) * self.workers * self.slices


def bucket_elements(bucket_mb: float | None, elements: int) -> int:
    """How many elements a bucket of `bucket_mb` MB of fp32 has; None leaves the choice to us."""
    if bucket_mb is not None:
        return max(1, int(bucket_mb * _ELEMENTS_PER_MB))
    # An exchange costs some wake-ups of threads whatever its size, so the fewer the better; but four hide three
    # quarters of the wire behind backward, and beyond 32 MB nothing is gained. docs/benchmarks/README.md has the sweep.
    return min(max(elements // 4, 4 * _ELEMENTS_PER_MB), 32 * _ELEMENTS_PER_MB)


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor is contiguous or channels-last: a kernel may walk its memory from the first address on."""
    if tensor.is_contiguous():
        return True
    return (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)) or (
        tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)
    )

"""The flat space: where each parameter lies, and how the space is cut into buckets, slices and shards.

The layout depends only on the shapes, their order and the topology, so all ranks compute the same one, and unlike DDP's
buckets it never changes. Parameters are in reverse order, because backward finishes the last one first.

A bucket is cut into one *slice* per rank of a node, of which each rank works on its own. A slice is cut into one
*shard* per node, each owned by one of the ranks that work on that slice. In a flat topology every rank is a node, and
its slice is the whole bucket.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

WORD = 64
"""Elements per word of bits, and the alignment of every parameter."""

MAX_ELEMENTS = 1 << 37
"""Above this, the counters of the owners' random numbers would need more than 32 bits."""

_ELEMENTS_PER_MB = 2**20 // 4


@dataclass(frozen=True)
class Slot:
    """The place of one parameter: its index among the parameters, its first element, and its length."""

    index: int
    start: int
    numel: int

    @property
    def stop(self) -> int:
        """The first element at which another parameter may start."""
        return self.start + -(-self.numel // WORD) * WORD


@dataclass(frozen=True)
class Bucket:
    """A contiguous part of the flat space that is exchanged at once: `shards` shards of `shard_words` words each."""

    index: int
    first_word: int
    shard_words: int
    shards: int
    own_shards: range
    """The shards of this rank's slice."""
    slots: range
    """The positions, in flat order, of the parameters that have elements in it."""

    @property
    def start(self) -> int:
        """The first element."""
        return self.first_word * WORD

    @property
    def stop(self) -> int:
        """The element after the last one."""
        return self.start + self.shards * self.shard_elements

    @property
    def slices(self) -> int:
        """The number of slices."""
        return self.shards // len(self.own_shards)

    @property
    def shard_elements(self) -> int:
        """The length of a shard, in elements."""
        return self.shard_words * WORD

    @property
    def slice_elements(self) -> int:
        """The length of a slice, in elements."""
        return len(self.own_shards) * self.shard_elements

    @property
    def own_start(self) -> int:
        """The first element of this rank's slice."""
        return self.start + self.own_shards.start * self.shard_elements

    def shard_number(self, shard: int) -> int:
        """The number of one of its shards among the shards of all buckets."""
        return self.index * self.shards + shard

    def shift_of(self, held: range) -> int:
        """The difference between an element's index in the flat space and its index in a state that holds only the
        shards `held` of every bucket, one after another."""
        return self.start + held.start * self.shard_elements - self.start * len(held) // self.shards

    @property
    def state_shift(self) -> int:
        """`shift_of` for a state that holds this rank's slices."""
        return self.shift_of(self.own_shards)


@dataclass(frozen=True)
class Piece:
    """The elements that one parameter has in one shard, as a range of the flat space."""

    bucket: int
    shard: int
    start: int
    stop: int


class Layout:
    """The flat space of some parameters.

    Args:
        numels: the length of each parameter, in the caller's order.
        workers: the number of shards per slice.
        bucket_elements: the size of a bucket; rounded up so that shards are whole words.
        slices: the number of slices per bucket.
        own_slice: the slice of this rank.
        device: the device of the parameters and of everything as large as they are.
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
                f"{start} elements: thinwire's random numbers serve at most {MAX_ELEMENTS} elements per model"
            )
        self.buckets = self._cut(start // WORD, max(1, -(-bucket_elements // (WORD * workers * slices))))
        self.size = self.buckets[-1].stop if self.buckets else 0
        self.own_size = self.size // slices
        """The number of elements in this rank's slices."""
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
        """The pieces of a parameter, in order. Together they cover it exactly once."""
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
        """A parameter's elements of a flat tensor, in the shape and memory order of `like`."""
        stride = like.stride() if is_dense(like) else torch.empty(like.shape, device="meta").stride()
        return flat.as_strided(like.shape, stride, flat.storage_offset() + slot.start)

    def own_view(self, own: Tensor, slot: Slot, like: Tensor) -> Tensor:
        """A parameter's elements of a state that holds this rank's slices: in the shape of `like` if a bucket is one
        slice, otherwise a vector of the elements in this rank's slices."""
        return self.view(own, slot, like) if self.slices == 1 else self.held_view(own, slot, self._own_shards)

    def own_words_view(self, words: Tensor, slot: Slot) -> Tensor:
        """A parameter's words of a state that holds one bit per element of this rank's slices."""
        start, stop = self._held_range(slot, self._own_shards)
        return words[start // WORD : -(-stop // WORD)]

    def held_view(self, state: Tensor, slot: Slot, held: range) -> Tensor:
        """A parameter's elements of a state that holds the shards `held` of every bucket, as a vector."""
        return state[slice(*self._held_range(slot, held))]

    def _held_range(self, slot: Slot, held: range) -> tuple[int, int]:
        inside = [
            (piece.start - shift, piece.stop - shift)
            for piece in self.pieces(slot)
            if piece.shard in held
            for shift in (self.buckets[piece.bucket].shift_of(held),)
        ]
        # The pieces of a parameter have no gaps in such a state: where one bucket's part ends, the next begins.
        return (inside[0][0], inside[-1][1]) if inside else (0, 0)

    def shard_view(self, table: Tensor, slot: Slot) -> Tensor:
        """The entries of the shards in which a parameter has elements, of a table with one entry per shard."""
        numbers = [self.buckets[piece.bucket].shard_number(piece.shard) for piece in self.pieces(slot)]
        return table[numbers[0] : numbers[-1] + 1] if numbers else table[:0]

    def owned_by(self, node: int) -> range:
        """The shard that the rank of worker `node` with this slice owns: the same one in every bucket."""
        own = self._own_shards[node]
        return range(own, own + 1)

    def held_size(self, held: range) -> int:
        """The number of elements in the shards `held` of all buckets."""
        return self.size * len(held) // (self.workers * self.slices)

    @property
    def shards(self) -> int:
        """The number of shards of all buckets."""
        return len(self.buckets) * self.workers * self.slices


class Blocks:
    """How shards are cut into blocks, each with a number of its own in a table, such as a scale.

    Blocks are counted from the start of a shard, and the last one may be shorter. The table has a row of `per_shard`
    entries for every shard of the model. A shorter shard, in the last bucket, does not use all of them.

    Args:
        layout: the flat space.
        words: the words of a block; None if a block is a whole shard.
    """

    def __init__(self, layout: Layout, words: int | None) -> None:
        self._layout = layout
        self._words = words
        self.per_shard = max(map(self.of, layout.buckets), default=1)

    def of(self, bucket: Bucket) -> int:
        """The number of blocks in a shard of a bucket."""
        return 1 if self._words is None else blocks_in(bucket.shard_words, self._words)

    def number(self, bucket: Bucket, shard: int, block: int) -> int:
        """The place of a block in the table."""
        return bucket.shard_number(shard) * self.per_shard + block

    def cut(self, piece: Piece) -> Iterator[tuple[int, Piece]]:
        """The parts of a piece in the blocks of its shard, each with the number of the block in the shard."""
        if self._words is None:
            yield 0, piece
            return
        bucket, length = self._layout.buckets[piece.bucket], self._words * WORD
        first = bucket.start + piece.shard * bucket.shard_elements
        start = piece.start
        while start < piece.stop:
            block = (start - first) // length
            stop = min(piece.stop, first + (block + 1) * length)
            yield block, replace(piece, start=start, stop=stop)
            start = stop


def blocks_in(shard_words: int, block_words: int) -> int:
    """The number of blocks in a shard."""
    return -(-shard_words // block_words)


def bucket_elements(bucket_mb: float | None, elements: int, buckets: int = 4) -> int:
    """The number of elements in a bucket of `bucket_mb` MB of fp32; None for about `buckets` buckets.

    Every bucket costs some thread wake-ups, so few buckets are better. But four hide three quarters of the exchange
    behind backward, and buckets above 32 MB bring no gain. docs/benchmarks/README.md has the measurements.
    """
    if bucket_mb is not None:
        return max(1, int(bucket_mb * _ELEMENTS_PER_MB))
    smallest = 16 * _ELEMENTS_PER_MB // buckets
    return min(max(elements // buckets, smallest), 32 * _ELEMENTS_PER_MB)


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor is contiguous or channels-last, so that kernels can read its memory as one vector."""
    if tensor.is_contiguous():
        return True
    return (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)) or (
        tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)
    )

"""The packet buffers of a channel: one allocation for the packets that are sent and one for the answers, made once.

A packet is a header, the words of the compressor, and one presence bit per parameter of the bucket. Kernels reach the
bits of a parameter through *runs* (see `thinwire.kernels.reference`), so that a parameter's part of a bucket costs one
call, however many packets it spans.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.transport.layout import WORD, Blocks, Bucket, Layout, Piece, Slot
from thinwire.transport.memory import HOST, memory_of, untouched_zeros
from thinwire.transport.packet import HEADER_BYTES

WORD_BYTES = WORD // 8
MAX_CHANNELS = 4


@dataclass(frozen=True)
class Payload:
    """The sizes of a compressor's packets."""

    up_words: Callable[[int], int]
    """The words of a packet to an owner, given the words of the shard."""
    down_words: Callable[[int], int]
    """The words of an answer, given the words of the shard."""
    word_bytes: int = WORD_BYTES
    """The bytes in the first plane of a packet for each word of elements: one bit per element, unless stated."""
    in_place: bool = False
    """For large packets: an answer replaces the packet that it answers, which has been sent by then. Packets up and
    down must be equally long."""
    receive_window: Callable[[int], int] = lambda buckets: buckets
    """How many of so many buckets may be received at the same time. Each needs memory of its own. A sender waits until
    its receiver has memory, so a small window leaves a slow link idle."""
    leaves_out_zeros: bool = False
    """Whether a packet whose payload is all zeros is sent without it; see `thinwire.transport.empty`. On lanes only."""
    block_words: int | None = None
    """The words of a block, if shards are cut into `Blocks`: a run is then in a single block, and its last field is
    the number of the block instead of the shard."""


@dataclass(frozen=True)
class Frame:
    """The packets of one bucket: `(packets, bytes)` views of the buffers, and offsets."""

    bucket: Bucket
    sent: Tensor
    """One packet to each owner of a shard of this rank's slice."""
    answers: Tensor
    """One answer per shard of the bucket."""
    own_answers: Tensor
    """The answers for the shards of this rank's slice."""
    received: Tensor
    """One packet from each worker, for the shard that this rank owns."""
    sent_at: int
    """The byte of `PacketBuffers.sent` at which `sent` begins."""
    answers_at: int
    """The byte of `PacketBuffers.answers` at which `answers` begins."""
    up_presence: int
    """The byte of a packet in `sent` at which its presence bits begin."""
    down_presence: int
    """The same for a packet in `answers`."""
    presence_words: int
    up_tag: int
    """The tag of messages with packets of this bucket. Every channel has its own tags, so a rank that is in another
    stage than its peers waits until the timeout. With equal tags gloo would end the process when it received a message
    that is longer than the buffer."""
    down_tag: int
    """The tag of messages with answers."""


@dataclass(frozen=True)
class Part:
    """The elements that one parameter has in one bucket."""

    index: int
    """The number of this part among all parts; -1 for several that are joined."""
    frame: Frame
    up_runs: Tensor
    """Where the bits of its elements are in `PacketBuffers.sent`, for the elements of this rank's slice. In a
    hierarchical topology `in_param` counts from the start of the slice, because the encoded gradient is the node's mean
    of that slice."""
    down_runs: Tensor
    """Where the answers for all its elements are in `PacketBuffers.answers`."""
    presence: int
    """The presence bit of the parameter, shifted to its place."""
    rows: slice
    """The rows of `up_runs` in a table of all parts, one after another."""


class PacketBuffers:
    """The memory of all packets of a channel.

    Args:
        layout: the flat space.
        payload: the sizes of the packets.
        alone: whether there are no other workers.
        channel: the number of the channel among those that share connections, below `MAX_CHANNELS`.
    """

    def __init__(self, layout: Layout, payload: Payload, alone: bool, channel: int = 0) -> None:
        assert 0 <= channel < MAX_CHANNELS
        self.layout = layout
        self.commit_tag = MAX_CHANNELS * 2 * len(layout.buckets) + channel
        """The tag of the commit round."""
        geometry: list[tuple[Bucket, int, int, int]] = []
        for bucket in layout.buckets:
            presence = -(-len(bucket.slots) // WORD)
            up = HEADER_BYTES + WORD_BYTES * (payload.up_words(bucket.shard_words) + presence)
            down = HEADER_BYTES + WORD_BYTES * (payload.down_words(bucket.shard_words) + presence)
            geometry.append((bucket, up, down, presence))
        n, shards = layout.workers, layout.workers * layout.slices
        self._word_bytes = payload.word_bytes
        self._blocks = Blocks(layout, payload.block_words)
        self.leaves_out_zeros = payload.leaves_out_zeros
        self.receive_window = max(1, payload.receive_window(len(geometry)))
        """How many buckets are received at the same time: a bucket must be answered before the packets of the one that
        is so many places later may arrive, in the same memory."""
        self.answers = untouched_zeros(shards * sum(down for _, _, down, _ in geometry), torch.uint8, layout.device)
        up_sizes = [n * up for _, up, _, _ in geometry]
        self.sent = self.answers if payload.in_place else untouched_zeros(sum(up_sizes), torch.uint8, layout.device)
        # A bucket shares its memory with those that come any number of windows later.
        shared_sizes = [max(up_sizes[i :: self.receive_window]) for i in range(min(self.receive_window, len(up_sizes)))]
        received_at = [0, *itertools.accumulate(shared_sizes)]
        # A worker without peers reads its own packets where they are.
        self._received = self.sent if alone else untouched_zeros(received_at[-1], torch.uint8, layout.device)
        on_host = layout.device.type == "cpu"
        self.sent_memory = memory_of(self.sent) if on_host else memoryview(b"")
        self.answers_memory = memory_of(self.answers) if on_host else memoryview(b"")
        self._filled: list[int | None] = [None] * len(geometry)
        self._overwritten = payload.in_place
        self.frames: list[Frame] = []
        sent_at = answers_at = 0
        for bucket, up, down, presence in geometry:
            answers = self.answers[answers_at : answers_at + shards * down].view(shards, down)
            own_answers = answers[bucket.own_shards.start : bucket.own_shards.stop]
            if payload.in_place:
                sent_at = answers_at + bucket.own_shards.start * down
            sent = own_answers if payload.in_place else self.sent[sent_at : sent_at + n * up].view(n, up)
            first = received_at[bucket.index % self.receive_window]
            frame = Frame(
                bucket=bucket,
                sent=sent,
                answers=answers,
                own_answers=own_answers,
                received=sent if alone else self._received[first : first + n * up].view(n, up),
                sent_at=sent_at,
                answers_at=answers_at,
                up_presence=up - WORD_BYTES * presence,
                down_presence=down - WORD_BYTES * presence,
                presence_words=presence,
                up_tag=MAX_CHANNELS * 2 * bucket.index + channel,
                down_tag=MAX_CHANNELS * (2 * bucket.index + 1) + channel,
            )
            self.frames.append(frame)
            sent_at += n * up
            answers_at += shards * down
        self.parts: list[list[Part]] = []
        """For every parameter, in flat order, its parts in order of buckets."""
        count = row = 0
        for position, slot in enumerate(layout.slots):
            self.parts.append(self._parts(position, slot, count, row))
            count += len(self.parts[-1])
            row = self.parts[-1][-1].rows.stop if self.parts[-1] else row
        self.contents: list[list[tuple[int, Part]]] = [[] for _ in self.frames]
        """For every bucket its parts, each with the position of its parameter."""
        for position, parts in enumerate(self.parts):
            for part in parts:
                self.contents[part.frame.bucket.index].append((position, part))

        self._begun: list[tuple[int, list[int]]] = []
        """For every bucket, the positions of the parameters that begin in it, and all their presence bits."""
        for contents in self.contents:
            begun = [(position, part.presence) for position, part in contents if part is self.parts[position][0]]
            self._begun.append((sum(bit for _, bit in begun), [position for position, _ in begun]))

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """The tensors that hold packets."""
        return self.sent, self.answers, self._received

    def _parts(self, position: int, slot: Slot, first: int, first_row: int) -> list[Part]:
        parts: list[Part] = []
        for index, pieces in itertools.groupby(self.layout.pieces(slot), key=lambda piece: piece.bucket):
            frame = self.frames[index]
            own = frame.bucket.own_shards
            gradient_start = slot.start if self.layout.slices == 1 else frame.bucket.own_start
            up, down = [], []
            for block, piece in (cut for whole in pieces for cut in self._blocks.cut(whole)):
                if piece.shard in own:
                    row = frame.sent_at + (piece.shard - own.start) * frame.sent.shape[1]
                    up.append(self._run(piece, block, frame.bucket, gradient_start, row))
                row = frame.answers_at + piece.shard * frame.answers.shape[1]
                down.append(self._run(piece, block, frame.bucket, slot.start, row))
            presence = 1 << (position - frame.bucket.slots[0])
            rows = slice(first_row, first_row + len(up))
            first_row = rows.stop
            parts.append(Part(first + len(parts), frame, _table(up), _table(down), presence, rows))
        return parts

    def _run(self, piece: Piece, block: int, bucket: Bucket, start: int, row: int) -> list[int]:
        shard_start = bucket.start + piece.shard * bucket.shard_elements
        byte = row + HEADER_BYTES + (piece.start - shard_start) // WORD * self._word_bytes
        count, plane_bytes = piece.stop - piece.start, WORD_BYTES * bucket.shard_words
        number = self._blocks.number(bucket, piece.shard, block)
        return [piece.start, piece.start - start, count, byte, plane_bytes, number]

    def write_presence(self, frame: Frame, bits: int) -> None:
        """Write the presence bits of a bucket into all its packets, on the host."""
        data = bits.to_bytes(WORD_BYTES * frame.presence_words, "little")
        size = frame.sent.shape[1]
        for row in range(frame.sent.shape[0]):
            at = frame.sent_at + row * size + frame.up_presence
            self.sent_memory[at : at + len(data)] = data

    def fill_presence(self, frame: Frame, bits: int) -> None:
        """Write the presence bits of a bucket into all its packets, on a device."""
        if self._filled[frame.bucket.index] == bits and not self._overwritten:
            return  # the usual case: the same parameters have gradients in every step
        self._filled[frame.bucket.index] = bits
        at = slice(frame.up_presence, frame.up_presence + WORD_BYTES * frame.presence_words)
        fill_words(frame.sent[:, at].view(torch.int64), bits)

    def read_presence(self, frame: Frame) -> int:
        """The presence bits in the answers of a bucket, which are equal in all of them."""
        at = frame.answers_at + frame.down_presence
        return int.from_bytes(self.answers_memory[at : at + WORD_BYTES * frame.presence_words], "little")

    def present(self) -> list[int]:
        """The positions of the parameters that have a gradient on some worker, as the answers have it."""
        found: list[int] = []
        for frame, (all_bits, begun) in zip(self.frames, self._begun, strict=True):
            bits = self.read_presence(frame)
            if bits & all_bits == all_bits:  # the usual case
                found += begun
            else:
                found += [position for position in begun if bits & self.parts[position][0].presence]
        return found


def fill_words(rows: Tensor, bits: int) -> None:
    """Write the same bits into every row of words."""
    for i in range(rows.shape[1]):
        value = bits >> WORD * i & (1 << WORD) - 1
        rows[:, i] = value - (1 << WORD) if value >> WORD - 1 else value


def _table(runs: list[list[int]]) -> Tensor:
    return torch.tensor(runs, dtype=torch.int64, device=HOST).view(-1, 6)

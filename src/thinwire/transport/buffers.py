"""The packets of all buckets: one allocation for what is sent and one for the answers, made once.

A packet is a header, the compressor's words, and one presence bit per parameter of the bucket. Kernels reach the bits
of a parameter through *runs* (see `thinwire.kernels.reference`), so that a parameter's part of a bucket costs one call,
however many packets it spans.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.transport.layout import WORD, Bucket, Layout, Piece, Slot
from thinwire.transport.memory import HOST, memory_of, untouched_zeros
from thinwire.transport.packet import HEADER_BYTES

WORD_BYTES = WORD // 8
MAX_CHANNELS = 4


@dataclass(frozen=True)
class Payload:
    """How many words a compressor puts into a packet for a shard of so many words, and how many bits of them an element
    has, those of further planes not counted."""

    up_words: Callable[[int], int]
    down_words: Callable[[int], int]
    element_bits: int = 1
    in_place: bool = False
    """For packets as large as the gradients themselves: an answer takes the place of the packet that it answers, which
    is gone by then, and buckets are received one after the other in the same room. Up and down must be equally long."""


@dataclass(frozen=True)
class Frame:
    """Where one bucket's packets lie: `(packets, bytes)` views of the buffers, and offsets within a packet."""

    bucket: Bucket
    sent: Tensor
    """A packet for each owner of a shard of this rank's slice."""
    answers: Tensor
    """An answer for every shard of the bucket."""
    own_answers: Tensor
    """Those for the shards of this rank's slice."""
    received: Tensor
    """A packet from each worker for the shard that this rank owns."""
    sent_at: int
    """The byte at which this bucket's packets begin, in the memory of those sent."""
    answers_at: int
    up_presence: int
    """The byte within an up packet at which the presence bits begin."""
    down_presence: int
    presence_words: int
    up_tag: int
    """Of messages with this bucket's packets. Other channels have other tags: a rank that is in another stage than its
    peers waits until the timeout. A message that is longer than the room for it would end the process, inside gloo."""
    down_tag: int


@dataclass(frozen=True)
class Part:
    """What a parameter has in one bucket."""

    index: int
    """Its number among all parts."""
    frame: Frame
    up_runs: Tensor
    """Where its bits stand in `PacketBuffers.sent`; only those of this rank's slice. In a hierarchical topology
    `in_param` counts from the start of that slice, because the gradient that is encoded is the node's mean of it."""
    down_runs: Tensor
    """Where their answers stand in `PacketBuffers.answers`."""
    presence: int
    """Its presence bit, in place."""


class PacketBuffers:
    """Buffers and addresses for the packets of a layout.

    Args:
        layout: the flat space.
        payload: what packets carry.
        alone: whether there are no other workers.
        channel: the number of the channel among those that share connections, below `MAX_CHANNELS`.
    """

    def __init__(self, layout: Layout, payload: Payload, alone: bool, channel: int = 0) -> None:
        assert 0 <= channel < MAX_CHANNELS
        self.layout = layout
        self.commit_tag = MAX_CHANNELS * 2 * len(layout.buckets) + channel
        """Of the messages at the end of an exchange."""
        geometry: list[tuple[Bucket, int, int, int]] = []
        for bucket in layout.buckets:
            presence = -(-len(bucket.slots) // WORD)
            up = HEADER_BYTES + WORD_BYTES * (payload.up_words(bucket.shard_words) + presence)
            down = HEADER_BYTES + WORD_BYTES * (payload.down_words(bucket.shard_words) + presence)
            geometry.append((bucket, up, down, presence))
        n, shards = layout.workers, layout.workers * layout.slices
        self._element_bits = payload.element_bits
        self.one_room = payload.in_place and not alone
        """Whether all buckets are received in the same place, so that one must be answered before the next comes."""
        self.answers = untouched_zeros(shards * sum(down for _, _, down, _ in geometry), torch.uint8, layout.device)
        up_sizes = [n * up for _, up, _, _ in geometry]
        self.sent = self.answers if payload.in_place else untouched_zeros(sum(up_sizes), torch.uint8, layout.device)
        # A worker without peers reads what it has "sent".
        room = max(up_sizes, default=0) if payload.in_place else sum(up_sizes)
        self._received = self.sent if alone else untouched_zeros(room, torch.uint8, layout.device)
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
            received_at = 0 if self.one_room else sent_at
            frame = Frame(
                bucket=bucket,
                sent=sent,
                answers=answers,
                own_answers=own_answers,
                received=sent if alone else self._received[received_at : received_at + n * up].view(n, up),
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
        """For every parameter, in flat order, its part of each bucket that it reaches into."""
        count = 0
        for position, slot in enumerate(layout.slots):
            self.parts.append(self._parts(position, slot, count))
            count += len(self.parts[-1])
        self.contents: list[list[tuple[int, Part]]] = [[] for _ in self.frames]
        """For every bucket the parts that it consists of, and the positions of their parameters."""
        for position, parts in enumerate(self.parts):
            for part in parts:
                self.contents[part.frame.bucket.index].append((position, part))

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """All that packets are in."""
        return self.sent, self.answers, self._received

    def _parts(self, position: int, slot: Slot, first: int) -> list[Part]:
        parts: list[Part] = []
        for index, pieces in itertools.groupby(self.layout.pieces(slot), key=lambda piece: piece.bucket):
            frame = self.frames[index]
            own = frame.bucket.own_shards
            gradient_start = slot.start if self.layout.slices == 1 else frame.bucket.own_start
            up, down = [], []
            for piece in pieces:
                if piece.shard in own:
                    row = frame.sent_at + (piece.shard - own.start) * frame.sent.shape[1]
                    up.append(self._run(piece, frame.bucket, gradient_start, row))
                row = frame.answers_at + piece.shard * frame.answers.shape[1]
                down.append(self._run(piece, frame.bucket, slot.start, row))
            presence = 1 << (position - frame.bucket.slots[0])
            parts.append(Part(first + len(parts), frame, _table(up), _table(down), presence))
        return parts

    def _run(self, piece: Piece, bucket: Bucket, start: int, row: int) -> list[int]:
        shard_start = bucket.start + piece.shard * bucket.shard_elements
        byte = row + HEADER_BYTES + (piece.start - shard_start) * self._element_bits // 8
        count, plane_bytes = piece.stop - piece.start, WORD_BYTES * bucket.shard_words
        return [piece.start, piece.start - start, count, byte, plane_bytes, bucket.shard_number(piece.shard)]

    def write_presence(self, frame: Frame, bits: int) -> None:
        """Put the presence bits of a bucket into all its packets."""
        data = bits.to_bytes(WORD_BYTES * frame.presence_words, "little")
        size = frame.sent.shape[1]
        for row in range(frame.sent.shape[0]):
            at = frame.sent_at + row * size + frame.up_presence
            self.sent_memory[at : at + len(data)] = data

    def fill_presence(self, frame: Frame, bits: int) -> None:
        """The same for packets on a device, which a host can only fill with numbers."""
        if self._filled[frame.bucket.index] == bits and not self._overwritten:
            return  # as a rule: what has a gradient in one step has one in the next
        self._filled[frame.bucket.index] = bits
        at = slice(frame.up_presence, frame.up_presence + WORD_BYTES * frame.presence_words)
        fill_words(frame.sent[:, at].view(torch.int64), bits)

    def read_presence(self, frame: Frame) -> int:
        """Which parameters of a bucket have a gradient on some worker; every owner's answer says the same."""
        at = frame.answers_at + frame.down_presence
        return int.from_bytes(self.answers_memory[at : at + WORD_BYTES * frame.presence_words], "little")


def fill_words(rows: Tensor, bits: int) -> None:
    """Put the same bits into every row of words on a device."""
    for i in range(rows.shape[1]):
        value = bits >> WORD * i & (1 << WORD) - 1
        rows[:, i] = value - (1 << WORD) if value >> WORD - 1 else value


def _table(runs: list[list[int]]) -> Tensor:
    return torch.tensor(runs, dtype=torch.int64, device=HOST).view(-1, 6)

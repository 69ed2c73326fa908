"""The packets of all buckets: one allocation for what is sent and one for the answers, made once.

A packet is a header, the codec's words, and one presence bit a parameter of the bucket. Kernels reach the bits of a
parameter through *runs* (see `thinwire.kernels.reference`), so that a parameter's part of a bucket costs one call,
however many packets it spans.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.wire.buckets import WORD, Bucket, Layout, Piece, Slot
from thinwire.wire.packet import HEADER_BYTES

WORD_BYTES = WORD // 8


@dataclass(frozen=True)
class Payload:
    """How many words a codec puts into a packet for a shard of so many words."""

    up_words: Callable[[int], int]
    down_words: Callable[[int], int]


@dataclass(frozen=True)
class Frame:
    """Where one bucket's packets lie: `(ranks, bytes)` views of the buffers, and offsets within a packet."""

    bucket: Bucket
    sent: Tensor
    answers: Tensor
    received: Tensor
    copies: Tensor
    """Room for an answer to every rank, in the place of what was received."""
    sent_at: int
    """The byte of `Mail.sent` at which this bucket's packets begin."""
    answers_at: int
    up_presence: int
    """The byte within an up packet at which the presence bits begin."""
    down_presence: int
    presence_words: int


@dataclass(frozen=True)
class Part:
    """What a parameter has in one bucket."""

    frame: Frame
    up_runs: Tensor
    """Where its bits stand in `Mail.sent`."""
    down_runs: Tensor
    """Where their answers stand in `Mail.answers`."""
    presence: int
    """Its presence bit, in place."""


class Mail:
    """Buffers and addresses for the packets of a layout."""

    def __init__(self, layout: Layout, payload: Payload, alone: bool) -> None:
        self.layout = layout
        geometry: list[tuple[Bucket, int, int, int]] = []
        for bucket in layout.buckets:
            presence = -(-len(bucket.slots) // WORD)
            up = HEADER_BYTES + WORD_BYTES * (payload.up_words(bucket.shard_words) + presence)
            down = HEADER_BYTES + WORD_BYTES * (payload.down_words(bucket.shard_words) + presence)
            geometry.append((bucket, up, down, presence))
        n = layout.world_size
        self.sent = torch.zeros(n * sum(up for _, up, _, _ in geometry), dtype=torch.uint8)
        self.answers = torch.zeros(n * sum(down for _, _, down, _ in geometry), dtype=torch.uint8)
        # The lane handles one bucket at a time, so all of them are received, and later copied for sending, in the same
        # place. A worker without peers reads what it has "sent".
        room = 0 if alone else n * max((max(up, down) for _, up, down, _ in geometry), default=0)
        self._scratch = torch.zeros(room, dtype=torch.uint8)
        self.sent_memory = memory_of(self.sent)
        self.answers_memory = memory_of(self.answers)
        self.received_memory = self.sent_memory if alone else memory_of(self._scratch)
        self.frames: list[Frame] = []
        sent_at = answers_at = 0
        for bucket, up, down, presence in geometry:
            sent = self.sent[sent_at : sent_at + n * up].view(n, up)
            frame = Frame(
                bucket=bucket,
                sent=sent,
                answers=self.answers[answers_at : answers_at + n * down].view(n, down),
                received=sent if alone else self._scratch[: n * up].view(n, up),
                copies=self._scratch[: 0 if alone else n * down].view(-1, down),
                sent_at=sent_at,
                answers_at=answers_at,
                up_presence=up - WORD_BYTES * presence,
                down_presence=down - WORD_BYTES * presence,
                presence_words=presence,
            )
            self.frames.append(frame)
            sent_at += n * up
            answers_at += n * down
        self.parts = [self._parts(position, slot) for position, slot in enumerate(layout.slots)]
        """For every parameter, in flat order, its part of each bucket that it reaches into."""
        self.parts_in = [0] * len(self.frames)
        """How many parts each bucket consists of."""
        for part in itertools.chain.from_iterable(self.parts):
            self.parts_in[part.frame.bucket.index] += 1

    def _parts(self, position: int, slot: Slot) -> list[Part]:
        parts: list[Part] = []
        for index, pieces in itertools.groupby(self.layout.pieces(slot), key=lambda piece: piece.bucket):
            frame = self.frames[index]
            here = list(pieces)
            up = [_run(slot, piece, frame, frame.sent_at, frame.sent) for piece in here]
            down = [_run(slot, piece, frame, frame.answers_at, frame.answers) for piece in here]
            presence = 1 << (position - frame.bucket.slots[0])
            parts.append(Part(frame, torch.tensor(up), torch.tensor(down), presence))
        return parts

    def write_presence(self, frame: Frame, bits: int) -> None:
        """Put the presence bits of a bucket into all its packets."""
        data = bits.to_bytes(WORD_BYTES * frame.presence_words, "little")
        size = frame.sent.shape[1]
        for row in range(frame.sent.shape[0]):
            at = frame.sent_at + row * size + frame.up_presence
            self.sent_memory[at : at + len(data)] = data

    def read_presence(self, frame: Frame) -> int:
        """Which parameters of a bucket have a gradient on some worker; every owner's answer says the same."""
        at = frame.answers_at + frame.down_presence
        return int.from_bytes(self.answers_memory[at : at + WORD_BYTES * frame.presence_words], "little")


def _run(slot: Slot, piece: Piece, frame: Frame, base: int, packets: Tensor) -> tuple[int, int, int, int, int]:
    bucket = frame.bucket
    shard_start = bucket.start + piece.shard * bucket.shard_words * WORD
    byte = base + piece.shard * packets.shape[1] + HEADER_BYTES + (piece.start - shard_start) // 8
    return piece.start, piece.start - slot.start, piece.stop - piece.start, byte, WORD_BYTES * bucket.shard_words


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a dense tensor, without NumPy, which torch can do without. The caller keeps the tensor alive."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")

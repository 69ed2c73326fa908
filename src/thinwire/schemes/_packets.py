"""What schemes need to know of packets: how codecs fill them, and the runs of the shards that a rank answers for."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.codecs.sign import Sign
from thinwire.wire.buckets import WORD, Bucket, Layout
from thinwire.wire.mail import WORD_BYTES, Frame, Mail, Payload
from thinwire.wire.packet import HEADER_BYTES

_SCALE = struct.Struct("<f")


def payload_of(codec: Codec, more_words: Callable[[int], int] = lambda _: 0) -> Payload:
    """What packets carry, up and down, when a codec fills them and leaves room for more words."""

    def words(shard_words: int) -> int:
        return codec.nbytes(WORD * shard_words) // WORD_BYTES + more_words(shard_words)

    return Payload(up_words=words, down_words=words)


class SignPackets:
    """Packets of signs and scales, and the sums that scales are made of.

    Args:
        mail: the packets.
        codec: what they carry.
        sums: how many sums a run has.
    """

    def __init__(self, mail: Mail, codec: Sign, sums: int) -> None:
        self.mail = mail
        self._codec = codec
        self.sums: list[Tensor] = []
        """For every part the sums of each of its runs."""
        self._of_shard: list[list[Tensor]] = [[] for _ in range(mail.layout.shards)]
        for part in (part for parts in mail.parts for part in parts):
            of_part = torch.zeros(part.up_runs.shape[0], sums, dtype=torch.float64)
            self.sums.append(of_part)
            for run, number in enumerate(part.up_runs[:, 5].tolist()):
                self._of_shard[number].append(of_part[run])
        self.answers: list[tuple[Bucket, Tensor, Tensor]] = []
        """For every bucket the signs and scales of its answers, a row a shard."""
        for frame in mail.frames:
            payloads, length = frame.answers[:, HEADER_BYTES:], frame.bucket.shard_elements
            self.answers.append((frame.bucket, codec.signs_of(payloads, length), codec.scales_of(payloads, length)))

    def sums_of(self, number: int) -> list[list[float]]:
        """The sums of all runs of a shard."""
        return [of_run.tolist() for of_run in self._of_shard[number]]

    def received_scales(self, frame: Frame) -> Tensor:
        """The scale of what each worker has sent."""
        return self._codec.scales_of(frame.received[:, HEADER_BYTES:], frame.bucket.shard_elements).contiguous()

    def read_answers(self, scales: Tensor) -> None:
        """Put the scales of all answers into a table that has one for every shard."""
        for bucket, _, of_bucket in self.answers:
            number = bucket.shard_number(0)
            scales[number : number + bucket.shards] = of_bucket

    def write_sent(self, frame: Frame, row: int, scale: float) -> None:
        """Put a scale into a packet to be sent."""
        at = frame.sent_at + row * frame.sent.shape[1] + self._scale_at(frame)
        _SCALE.pack_into(self.mail.sent_memory, at, scale)

    def write_answer(self, frame: Frame, shard: int, scale: float) -> None:
        """Put a scale into an answer."""
        at = frame.answers_at + shard * frame.answers.shape[1] + self._scale_at(frame)
        _SCALE.pack_into(self.mail.answers_memory, at, scale)

    def _scale_at(self, frame: Frame) -> int:
        return HEADER_BYTES + self._codec.scale_at(frame.bucket.shard_elements)


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

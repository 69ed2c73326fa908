"""The layout of packets that a codec fills, and the runs of the shards that a rank owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.compressors.codecs import Codec
from thinwire.compressors.codecs.sign import Sign
from thinwire.errors import CorruptPacket
from thinwire.transport.buffers import WORD_BYTES, Frame, PacketBuffers, Part, Payload
from thinwire.transport.layout import WORD, Blocks, Bucket, Layout
from thinwire.transport.memory import HOST
from thinwire.transport.packet import HEADER_BYTES


def payload_of(codec: Codec, more_words: Callable[[int], int] = lambda _: 0, block_words: int | None = None) -> Payload:
    """The size of packets, up and down, that hold a codec's bytes and `more_words(shard_words)` words after them."""

    def words(shard_words: int) -> int:
        return words_of(codec, shard_words) + more_words(shard_words)

    return Payload(up_words=words, down_words=words, block_words=block_words)


def words_of(codec: Codec, shard_words: int) -> int:
    """The words of a codec's bytes for a shard."""
    return codec.nbytes(WORD * shard_words) // WORD_BYTES


def bytes_of(packet: Tensor, codec: Codec, length: int) -> Tensor:
    """A codec's bytes in a packet, for a shard of `length` elements."""
    return packet[HEADER_BYTES : HEADER_BYTES + codec.nbytes(length)]


@contextmanager
def naming_packet(what: str) -> Iterator[None]:
    """Name the packet if a codec rejects its bytes. The transport reports it to all ranks."""
    try:
        yield
    except ValueError as error:
        raise CorruptPacket(f"{what}: {error}") from error


class SignPackets:
    """Packets of signs and scales, and the sums from which scales are computed.

    Args:
        buffers: the packets.
        codec: the codec of their payload.
        sums: the number of sums per run.
        block_words: see `Payload`.
    """

    def __init__(self, buffers: PacketBuffers, codec: Sign, sums: int, block_words: int | None = None) -> None:
        self.buffers = buffers
        device = buffers.layout.device
        blocks = Blocks(buffers.layout, block_words)
        self._per_shard = blocks.per_shard
        parts = [part for parts in buffers.parts for part in parts]
        counts = [part.up_runs.shape[0] for part in parts]
        self.all_sums = torch.zeros(sum(counts) + 1, sums, dtype=torch.float64, device=device)
        """The sums of all runs, and a row of zeros."""
        self._sums = list(self.all_sums[:-1].split(counts))
        self.block_rows: list[list[int]] = [[] for _ in range(buffers.layout.shards * self._per_shard)]
        """For each block of the model, its rows of `all_sums`."""
        rows: list[list[int]] = [[] for _ in range(buffers.layout.shards)]
        numbers = [number for part in parts for number in part.up_runs[:, 5].tolist()]
        for row, number in enumerate(numbers):
            self.block_rows[number].append(row)
            rows[number // self._per_shard].append(row)
        self.rows_of = [torch.tensor(shard_rows, dtype=torch.int64, device=device) for shard_rows in rows]
        """For each shard of the model, its rows of `all_sums`."""
        self.answers: list[tuple[Bucket, Tensor, Tensor]] = []
        """For each bucket, the signs and the scales of its answers, one row per shard."""
        self.sent_scales: list[Tensor] = []
        """For each bucket, the scales in the packets to be sent, one row per packet."""
        self.received_scales: list[Tensor] = []
        """For each bucket, the scales that each worker sent, one row per worker."""
        for frame in buffers.frames:
            length, count = frame.bucket.shard_elements, blocks.of(frame.bucket)
            sent, received, answers = (
                packets[:, HEADER_BYTES:] for packets in (frame.sent, frame.received, frame.answers)
            )
            scales = codec.block_scales_of(answers, length, count)
            self.answers.append((frame.bucket, codec.signs_of(answers, length), scales))
            self.sent_scales.append(codec.block_scales_of(sent, length, count))
            self.received_scales.append(codec.block_scales_of(received, length, count))

    def sums(self, part: Part) -> Tensor:
        """The sums of the runs of a part."""
        return self._sums[part.index] if part.index >= 0 else self.all_sums[part.rows]

    def answer_scales(self, frame: Frame, shard: int) -> Tensor:
        """A view of the scales in an answer."""
        return self.answers[frame.bucket.index][2][shard]

    def read_answers(self, scales: Tensor) -> None:
        """Copy the scales of all answers into the table `scales`, which has one entry per block."""
        of_shards = scales.view(-1, self._per_shard)
        for bucket, _, bucket_scales in self.answers:
            number = bucket.shard_number(0)
            of_shards[number : number + bucket.shards, : bucket_scales.shape[1]] = bucket_scales


class OwnedRuns:
    """For each bucket, the runs of the shard that this rank owns. Their byte offsets count from the start of a packet.

    Args:
        layout: the flat space.
        node: this rank's worker.
        word_bytes, block_words: see `Payload`. The last field of a run is the number of its block in the shard.
    """

    def __init__(self, layout: Layout, node: int, word_bytes: int = WORD_BYTES, block_words: int | None = None) -> None:
        blocks = Blocks(layout, block_words)
        self.shards = layout.owned_by(node)
        self.size = layout.held_size(self.shards)
        """The number of elements in all owned shards."""
        self.positions: list[list[int]] = [[] for _ in layout.buckets]
        """For each bucket, the position of the parameter that each run belongs to."""
        self.lengths = [0] * (layout.shards * blocks.per_shard)
        """The number of elements of each block of the model, owned or not, without padding."""
        runs: list[list[list[int]]] = [[] for _ in layout.buckets]
        for position, slot in enumerate(layout.slots):
            for block, piece in (cut for whole in layout.pieces(slot) for cut in blocks.cut(whole)):
                bucket = layout.buckets[piece.bucket]
                self.lengths[blocks.number(bucket, piece.shard, block)] += piece.stop - piece.start
                if piece.shard in self.shards:
                    first = bucket.start + piece.shard * bucket.shard_elements
                    byte = HEADER_BYTES + (piece.start - first) // WORD * word_bytes
                    runs[bucket.index].append([piece.start, 0, piece.stop - piece.start, byte, 0, block])
                    self.positions[bucket.index].append(position)
        self.tables = [torch.tensor(rows, dtype=torch.int64, device=HOST).view(-1, 6) for rows in runs]
        self.rows = [torch.arange(len(table), device=layout.device) for table in self.tables]
        """For each bucket, the row numbers of a table of sums with one row per run."""

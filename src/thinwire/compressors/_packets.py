"""How codecs fill packets, and the runs of the shards that a rank owns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.compressors.codecs import Codec
from thinwire.compressors.codecs.sign import Sign
from thinwire.transport.buffers import WORD_BYTES, Frame, PacketBuffers, Payload
from thinwire.transport.layout import WORD, Bucket, Layout
from thinwire.transport.memory import HOST
from thinwire.transport.packet import HEADER_BYTES


def payload_of(codec: Codec, more_words: Callable[[int], int] = lambda _: 0) -> Payload:
    """What packets carry, up and down, when a codec fills them and leaves room for more words."""

    def words(shard_words: int) -> int:
        return codec.nbytes(WORD * shard_words) // WORD_BYTES + more_words(shard_words)

    return Payload(up_words=words, down_words=words)


class SignPackets:
    """Packets of signs and scales, and the sums that scales are made of.

    Args:
        buffers: the packets.
        codec: what they carry.
        sums: how many sums a run has.
    """

    def __init__(self, buffers: PacketBuffers, codec: Sign, sums: int) -> None:
        self.buffers = buffers
        self._codec = codec
        device = buffers.layout.device
        parts = [part for parts in buffers.parts for part in parts]
        counts = [part.up_runs.shape[0] for part in parts]
        self.all_sums = torch.zeros(sum(counts), sums, dtype=torch.float64, device=device)
        self.sums = list(self.all_sums.split(counts))
        """For every part the sums of each of its runs."""
        rows: list[list[int]] = [[] for _ in range(buffers.layout.shards)]
        numbers = [number for part in parts for number in part.up_runs[:, 5].tolist()]
        for row, number in enumerate(numbers):
            rows[number].append(row)
        self.rows_of = [torch.tensor(of_shard, dtype=torch.int64, device=device) for of_shard in rows]
        """For every shard of the model its rows of `all_sums`."""
        self.answers: list[tuple[Bucket, Tensor, Tensor]] = []
        """For every bucket the signs and scales of its answers, a row a shard."""
        self._sent_scales: list[Tensor] = []
        self._received_scales: list[Tensor] = []
        for frame in buffers.frames:
            length = frame.bucket.shard_elements
            sent, received, answers = (
                packets[:, HEADER_BYTES:] for packets in (frame.sent, frame.received, frame.answers)
            )
            self.answers.append((frame.bucket, codec.signs_of(answers, length), codec.scales_of(answers, length)))
            self._sent_scales.append(codec.scales_of(sent, length))
            self._received_scales.append(codec.scales_of(received, length))

    def received_scales(self, frame: Frame) -> Tensor:
        """The scale of what each worker has sent."""
        return self._received_scales[frame.bucket.index].contiguous()

    def sent_scale(self, frame: Frame, row: int) -> Tensor:
        """Where the scale of a packet to be sent stands, as a view."""
        return self._sent_scales[frame.bucket.index][row : row + 1]

    def answer_scale(self, frame: Frame, shard: int) -> Tensor:
        """Where the scale of an answer stands, as a view."""
        return self.answers[frame.bucket.index][2][shard : shard + 1]

    def read_answers(self, scales: Tensor) -> None:
        """Put the scales of all answers into a table that has one for every shard."""
        for bucket, _, of_bucket in self.answers:
            number = bucket.shard_number(0)
            scales[number : number + bucket.shards] = of_bucket


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
        self.tables = [torch.tensor(of_bucket, dtype=torch.int64, device=HOST).view(-1, 6) for of_bucket in runs]
        self.rows = [torch.arange(len(table), device=layout.device) for table in self.tables]
        """All rows of a table of sums that has one a run."""

"""The scaled sign: one bit per element, one scale per shard or block, and a residual.

A vector `c` is sent as `s·sign(c)`, with `s = ‖c‖₂/√len` for each shard, or for each block of a shard. The residual
`e = c - s·sign(c)` stays with the sender and is added to what it sends next. The scale is known only after a pass over
all of `c`, and writing `e` would take a second one. So the sender keeps `c` and the scale, and the next pass subtracts
on the fly. docs/protocol.md has the rules.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from thinwire.compressors._block_scales import BlockScales
from thinwire.compressors._packets import OwnedRuns, SignPackets, payload_of
from thinwire.compressors.codecs.sign import Sign
from thinwire.kernels.modes import Output, Scale
from thinwire.kernels.ops import Kernels
from thinwire.transport.buffers import Frame, PacketBuffers, Part
from thinwire.transport.layout import WORD, Blocks, Bucket, Layout, blocks_in
from thinwire.transport.memory import untouched_zeros
from thinwire.transport.state import State


class ScaledSign:
    """Workers send signs and scales, and owners answer with those of the mean. Both keep a residual.

    Args:
        layout: the flat space.
        node: the number of this rank's worker.
        kernels: the backend.
        dtype: the dtype of the residuals, float32 or bfloat16.
        memory: `layout.own_size` elements for `c`; None to allocate them.
        keep_previous: whether to keep the answer before the last one as well.
        scale_block: the number of elements that share a scale, a multiple of 64; None for one scale per shard.
    """

    def __init__(
        self,
        layout: Layout,
        node: int,
        kernels: Kernels,
        dtype: torch.dtype,
        memory: Tensor | None = None,
        *,
        keep_previous: bool = False,
        scale_block: int | None = None,
    ) -> None:
        self._layout = layout
        self._scale_block = scale_block
        self._block_words = block_words_of(scale_block)
        self._blocks = blocks = Blocks(layout, self._block_words)
        self._kernels = kernels
        self._codec = Sign(kernels)
        self.sent = untouched_zeros(layout.own_size, dtype, layout.device) if memory is None else memory
        """The last `c` of this rank's slices."""
        self._owned = OwnedRuns(layout, node, block_words=self._block_words)
        # One entry per block. Without blocks, that is one per shard.
        entries = layout.shards * blocks.per_shard
        self.sent_scales = torch.zeros(entries, dtype=torch.float32, device=layout.device)
        self.answer_scales = torch.zeros(entries, dtype=torch.float32, device=layout.device)
        self.answer = untouched_zeros(layout.size // WORD, torch.int64, layout.device)
        """The signs of the last answer, equal on all ranks; `answer_scales` are their scales."""
        self.answered = untouched_zeros(self._owned.size, dtype, layout.device)
        """The last `y` of the shards that this rank owns: the mean of all workers plus the residual."""
        self.previous_answer = (
            untouched_zeros(layout.size // WORD, torch.int64, layout.device) if keep_previous else None
        )
        self.previous_answer_scales = torch.zeros_like(self.answer_scales) if keep_previous else None
        self.payload = payload_of(
            self._codec, functools.partial(_more_scale_words, self._block_words), self._block_words
        )
        # The last row stays zero.
        self._owner_sums = [
            torch.zeros(len(table) + 1, 1, dtype=torch.float64, device=layout.device) for table in self._owned.tables
        ]

    def bind(self, buffers: PacketBuffers) -> None:
        """See `Compressor`."""
        self._packets = SignPackets(buffers, self._codec, 1, self._block_words)
        if self._block_words is not None:
            self._check_runs(buffers)
            self._sent_block_scales = [self._scales_of_sent(bucket) for bucket in self._layout.buckets]
            self._answer_block_scales = [self._scales_of_answer(bucket) for bucket in self._layout.buckets]

    def _check_runs(self, buffers: PacketBuffers) -> None:
        """Reject blocks so small that kernels on GPUs, which have a limit of runs, could not reach all of them."""
        most = max((len(part.down_runs) for parts in buffers.parts for part in parts), default=0)
        if self._layout.device.type == "cuda" and most > _MOST_RUNS_ON_GPU:
            raise ValueError(
                f"scale_block={self._scale_block}: a parameter has {most} blocks in one bucket, and kernels on GPUs "
                f"take at most {_MOST_RUNS_ON_GPU}. Expected a larger scale_block, or a smaller bucket_mb"
            )

    def _scales_of_sent(self, bucket: Bucket) -> BlockScales:
        """Those of all packets of a bucket."""
        numbers = [number for shard in bucket.own_shards for number in self._numbers(bucket, shard)]
        rows = [self._packets.block_rows[number] for number in numbers]
        lengths = [self._owned.lengths[number] for number in numbers]
        return BlockScales(rows, lengths, len(self._packets.all_sums) - 1, self._layout.device)

    def _scales_of_answer(self, bucket: Bucket) -> BlockScales:
        """Those of the answer for the owned shard of a bucket."""
        rows: list[list[int]] = [[] for _ in range(self._blocks.of(bucket))]
        for row, block in enumerate(self._owned.tables[bucket.index][:, 5].tolist()):
            rows[block].append(row)
        lengths = [self._owned.lengths[number] for number in self._numbers(bucket, self._owned.shards[0])]
        return BlockScales(rows, lengths, len(self._owner_sums[bucket.index]) - 1, self._layout.device)

    def _numbers(self, bucket: Bucket, shard: int) -> range:
        """The places of the scales of a shard in `sent_scales` and `answer_scales`."""
        first = self._blocks.number(bucket, shard, 0)
        return range(first, first + self._blocks.of(bucket))

    def _scales_at(self, scales: Tensor, bucket: Bucket, shard: int) -> Tensor:
        numbers = self._numbers(bucket, shard)
        return scales[numbers.start : numbers.stop]

    def encode(self, part: Part, grad: Tensor | None, *, beta: float, weight: float, scale: Scale) -> bool | None:
        """Send `beta` times the last answer plus `weight · scale` times the gradient; whether that is not finite."""
        return self._kernels.sign_encode(
            part.up_runs,
            grad,
            self.sent,
            self.answer,
            self._packets.buffers.sent,
            sent_scales=self.sent_scales,
            answer_scales=self.answer_scales,
            sums=self._packets.sums(part),
            beta=beta,
            weight=weight,
            scale=scale,
            shift=part.frame.bucket.state_shift,
        )

    def encode_momentum(
        self,
        part: Part,
        grad: Tensor | None,
        m: Tensor,
        *,
        beta: float,
        scale: Scale,
        rate: float,
        packets: Tensor | None,
        output: Output,
    ) -> bool | None:
        """Update the momentum `m` with the gradient, and add `rate · m` to what is sent now or later."""
        return self._kernels.momentum_encode(
            part.up_runs,
            grad,
            m,
            self.sent,
            packets,
            sent_scales=self.sent_scales,
            sums=self._packets.sums(part) if output == Output.SIGNS else None,
            beta=beta,
            weight=1.0 - beta,
            scale=scale,
            rate=rate,
            shift=part.frame.bucket.state_shift,
            output=output,
        )

    def seal(self, frame: Frame) -> None:
        """Add the scales."""
        bucket, packets = frame.bucket, self._packets
        to = packets.sent_scales[bucket.index]
        if self._block_words is not None:
            first, own = bucket.shard_number(bucket.own_shards[0]), len(bucket.own_shards)
            also = self.sent_scales.view(-1, self._blocks.per_shard)[first : first + own, : to.shape[1]]
            self._sent_block_scales[bucket.index].write(packets.all_sums, to, also)
            return
        for row, shard in enumerate(bucket.own_shards):
            number = bucket.shard_number(shard)
            self._kernels.shard_scale(
                packets.all_sums,
                packets.rows_of[number],
                to[row],
                self.sent_scales[number : number + 1],
                length=self._owned.lengths[number],
            )

    def merge(self, frame: Frame, shard: int) -> None:
        """Answer with the scaled sign of the mean plus the residual of the last answer."""
        bucket = frame.bucket
        sums = self._owner_sums[bucket.index]
        self._kernels.sign_merge(
            self._owned.tables[bucket.index],
            frame.received,
            self.answered,
            frame.answers[shard],
            scales=self._packets.received_scales[bucket.index],
            last_scales=self._scales_at(self.answer_scales, bucket, shard),
            sums=sums,
            shift=bucket.shift_of(self._owned.shards),
        )
        to = self._packets.answer_scales(frame, shard)
        if self._block_words is not None:
            self._answer_block_scales[bucket.index].write(sums, to)
            return
        length = self._owned.lengths[bucket.shard_number(shard)]
        self._kernels.shard_scale(sums, self._owned.rows[bucket.index], to, None, length=length)

    def state(self) -> State:
        """See `Compressor`."""
        state = State(
            own={"sent": self.sent},
            owned={"answered": self.answered},
            words={"answer": self.answer},
            shards={"sent_scale": self._by_shard(self.sent_scales), "answer_scale": self._by_shard(self.answer_scales)},
        )
        if self.previous_answer is not None and self.previous_answer_scales is not None:
            state.words["answer_before"] = self.previous_answer
            state.shards["answer_scale_before"] = self._by_shard(self.previous_answer_scales)
        return state

    def _by_shard(self, scales: Tensor) -> Tensor:
        return scales if self._block_words is None else scales.view(-1, self._blocks.per_shard)

    def read_answers(self) -> None:
        """Copy the answers from the packets, after the exchange."""
        if self.previous_answer is not None and self.previous_answer_scales is not None:
            self.previous_answer.copy_(self.answer)
            self.previous_answer_scales.copy_(self.answer_scales)
        self._packets.read_answers(self.answer_scales)
        for bucket, signs, _ in self._packets.answers:
            self.answer[bucket.first_word : bucket.stop // WORD].view(bucket.shards, -1).copy_(signs)

    @property
    def has_previous(self) -> bool:
        """Whether there is an answer before the last one. At the start there is none, or one of zeros."""
        return self.previous_answer_scales is not None and bool(self.previous_answer_scales.any())

    def reset(self) -> None:
        """Set the residuals and the last answer to zero."""
        for memory in (self.sent, self.answered, self.sent_scales, self.answer_scales, self.answer):
            memory.zero_()

    def scale_residuals(self, factors: Sequence[float]) -> None:
        """Multiply the residuals at the worker and at the owner by one factor per parameter."""
        for parts, factor in zip(self._packets.buffers.parts, factors, strict=True):
            for part in parts:
                _scale_residual(
                    part.up_runs,
                    [factor] * len(part.up_runs),
                    self.sent,
                    part.frame.bucket.state_shift,
                    self.sent_scales,
                )
        for bucket, runs, owners in zip(self._layout.buckets, self._owned.tables, self._owned.positions, strict=True):
            shift = bucket.shift_of(self._owned.shards)
            scales = self._scales_at(self.answer_scales, bucket, self._owned.shards[0])
            _scale_residual(runs, [factors[position] for position in owners], self.answered, shift, scales)
        # The sent values are subtracted now, so the next pass must not subtract them again.
        self.sent_scales.zero_()
        self.answer_scales.zero_()

    def start_from(self, m: Tensor, factors: Sequence[float]) -> None:
        """Continue from a dense momentum, times one factor per parameter in flat order.

        It has not been sent yet, so it becomes the residual; the scale 0 means that nothing is subtracted from it.
        """
        for parts, factor in zip(self._packets.buffers.parts, factors, strict=True):
            for part in parts:
                shift = part.frame.bucket.state_shift
                for element, _, count, *_ in part.up_runs.tolist():
                    here = self.sent[element - shift : element - shift + count]
                    for to, values in zip(here.split(_CHUNK), m[element : element + count].split(_CHUNK), strict=True):
                        to.copy_(values * factor)


_CHUNK = 1 << 18
"""The number of elements that are converted at a time, to keep temporaries small."""
_MOST_RUNS_ON_GPU = 65535
"""The second dimension of a grid, in which kernels count runs."""


def block_words_of(scale_block: int | None) -> int | None:
    """The words of a block of `scale_block` elements."""
    return None if scale_block is None else scale_block // WORD


def _more_scale_words(block_words: int | None, shard_words: int) -> int:
    """The words of scales, two in each, after the first."""
    return 0 if block_words is None else (blocks_in(shard_words, block_words) - 1) // 2


def _scale_residual(runs: Tensor, factors: Sequence[float], memory: Tensor, shift: int, scales: Tensor) -> None:
    rows = runs.tolist()
    for first, stop in _stretches(rows, factors):
        start, (last, _, count, *_) = rows[first][0] - shift, rows[stop - 1]
        scale = scales[runs[first:stop, 5].to(scales.device)]
        if stop - first > 1:
            scale = scale.repeat_interleave(runs[first:stop, 2].to(scales.device))
        for c in memory[start : last - shift + count].split(_CHUNK):
            values = c.to(torch.float32)
            sent = torch.where(values >= 0, scale, -scale)
            c.copy_((values - sent) * factors[first])


def _stretches(rows: Sequence[Sequence[int]], factors: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Ranges of runs that can be handled at once: one run, or some that follow each other and have the same factor."""
    first = 0
    for i in range(1, len(rows) + 1):
        if i < len(rows):
            (before, _, count, *_), (element, _, next_count, *_) = rows[i - 1], rows[i]
            follows = element == before + count and factors[i] == factors[i - 1]
            if follows and element + next_count - rows[first][0] <= _CHUNK:
                continue
        yield first, i
        first = i

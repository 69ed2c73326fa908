"""The scaled sign: one bit an element and one scale a shard, and a memory of what they did not say.

A vector `c` travels as `s·sign(c)`, with `s = ‖c‖₂/√len` for each shard. The rest, `e = c - s·sign(c)`, stays with the
sender and is added to what it sends next. The scale is known only when all of `c` is, and a second pass over memory
would cost as much as the first: so `e` is never written. What is kept is `c` itself and the scale that it was sent
with, and whoever reads `c` next takes `e` on the way. docs/protocol.md has the rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.compressors._packets import OwnedRuns, SignPackets, payload_of
from thinwire.compressors.codecs.sign import Sign
from thinwire.kernels.modes import Output, Scale
from thinwire.kernels.ops import Kernels
from thinwire.transport.buffers import Frame, PacketBuffers, Part
from thinwire.transport.layout import WORD, Layout
from thinwire.transport.memory import untouched_zeros


class ScaledSign:
    """Signs and scales up, those of their mean down, with error memory at both ends.

    Args:
        layout: the flat space.
        node: this worker's number.
        kernels: the backend.
        dtype: of the error memories, float32 or bfloat16.
        memory: of `layout.own_size` elements to keep `c` in, where the caller has some to spare.
        remembers: whether to keep the answer before the last one too.
    """

    def __init__(
        self,
        layout: Layout,
        node: int,
        kernels: Kernels,
        dtype: torch.dtype,
        memory: Tensor | None = None,
        *,
        remembers: bool = False,
    ) -> None:
        self._layout = layout
        self._kernels = kernels
        self._codec = Sign(kernels)
        self.sent = untouched_zeros(layout.own_size, dtype, layout.device) if memory is None else memory
        """`c` of this rank's slices, as it was sent last."""
        self._owned = OwnedRuns(layout, node)
        self.sent_scales = torch.zeros(layout.shards, dtype=torch.float32, device=layout.device)
        self.answer_scales = torch.zeros(layout.shards, dtype=torch.float32, device=layout.device)
        self.answer = untouched_zeros(layout.size // WORD, torch.int64, layout.device)
        """The signs of the last answer, the same on all ranks, and with `answer_scales` what they stand for."""
        self.answered = untouched_zeros(self._owned.size, dtype, layout.device)
        """`y` of the shards that this rank owns, as it was answered last."""
        self.answer_before = untouched_zeros(layout.size // WORD, torch.int64, layout.device) if remembers else None
        self.answer_scales_before = torch.zeros_like(self.answer_scales) if remembers else None
        self.payload = payload_of(self._codec)
        self._owner_sums = [
            torch.zeros(len(table), 1, dtype=torch.float64, device=layout.device) for table in self._owned.tables
        ]

    def bind(self, buffers: PacketBuffers) -> None:
        """See `Compressor`."""
        self._packets = SignPackets(buffers, self._codec, 1)

    def encode(self, part: Part, grad: Tensor | None, *, beta: float, weight: float, scale: Scale) -> bool | None:
        """Send `beta` times the last answer plus `weight` times the scaled gradient; whether it was not finite."""
        return self._kernels.sign_encode(
            part.up_runs,
            grad,
            self.sent,
            self.answer,
            self._packets.buffers.sent,
            sent_scales=self.sent_scales,
            answer_scales=self.answer_scales,
            sums=self._packets.sums[part.index],
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
        """Let the gradient into the momentum `m` and add `rate` times it to what is to be sent, now or later."""
        return self._kernels.momentum_encode(
            part.up_runs,
            grad,
            m,
            self.sent,
            packets,
            sent_scales=self.sent_scales,
            sums=self._packets.sums[part.index] if output == Output.SIGNS else None,
            beta=beta,
            weight=1.0 - beta,
            scale=scale,
            rate=rate,
            shift=part.frame.bucket.state_shift,
            output=output,
        )

    def seal(self, frame: Frame) -> None:
        """Add the scales."""
        for row, shard in enumerate(frame.bucket.own_shards):
            number, packets = frame.bucket.shard_number(shard), self._packets
            self._kernels.shard_scale(
                packets.all_sums,
                packets.rows_of[number],
                packets.sent_scale(frame, row),
                self.sent_scales[number : number + 1],
                length=self._owned.lengths[number],
            )

    def merge(self, frame: Frame, shard: int) -> None:
        """Answer with the scaled sign of the mean and of what the last answer left unsaid."""
        bucket = frame.bucket
        number = bucket.shard_number(shard)
        sums = self._owner_sums[bucket.index]
        self._kernels.sign_merge(
            self._owned.tables[bucket.index],
            frame.received,
            self.answered,
            frame.answers[shard],
            scales=self._packets.received_scales(frame),
            last_scale=self.answer_scales[number : number + 1],
            sums=sums,
            shift=bucket.shift_of(self._owned.shards),
        )
        to, length = self._packets.answer_scale(frame, shard), self._owned.lengths[number]
        self._kernels.shard_scale(sums, self._owned.rows[bucket.index], to, None, length=length)

    def adopt(self) -> None:
        """Take the answers over from the packets, when the whole exchange is done."""
        if self.answer_before is not None and self.answer_scales_before is not None:
            self.answer_before.copy_(self.answer)
            self.answer_scales_before.copy_(self.answer_scales)
        self._packets.read_answers(self.answer_scales)
        for bucket, signs, _ in self._packets.answers:
            self.answer[bucket.first_word : bucket.stop // WORD].view(bucket.shards, -1).copy_(signs)

    @property
    def has_before(self) -> bool:
        """Whether an answer before the last one is remembered. There is none after a start, or only zeros."""
        return self.answer_scales_before is not None and bool(self.answer_scales_before.any())

    def forget(self) -> None:
        """Start all memories from zero."""
        for memory in (self.sent, self.answered, self.sent_scales, self.answer_scales, self.answer):
            memory.zero_()

    def fade(self, factors: Sequence[float]) -> None:
        """Multiply what has not been said yet by a factor for each parameter, at the worker and at the owner."""
        for parts, factor in zip(self._packets.buffers.parts, factors, strict=True):
            for part in parts:
                _fade(
                    part.up_runs,
                    [factor] * len(part.up_runs),
                    self.sent,
                    part.frame.bucket.state_shift,
                    self.sent_scales,
                )
        for bucket, runs, owners in zip(self._layout.buckets, self._owned.tables, self._owned.positions, strict=True):
            shift = bucket.shift_of(self._owned.shards)
            _fade(runs, [factors[position] for position in owners], self.answered, shift, self.answer_scales)
        # Errors have been taken: there is nothing to take from them any more.
        self.sent_scales.zero_()
        self.answer_scales.zero_()

    def start_from(self, m: Tensor, factors: Sequence[float]) -> None:
        """Go on from a dense momentum, times a factor for each parameter in flat order, as the last answer's part.

        It has not been said yet, so it stands where unsaid things do: in the error, of which a scale of 0 takes
        nothing.
        """
        for parts, factor in zip(self._packets.buffers.parts, factors, strict=True):
            for part in parts:
                shift = part.frame.bucket.state_shift
                for element, _, count, *_ in part.up_runs.tolist():
                    here = self.sent[element - shift : element - shift + count]
                    for to, values in zip(
                        here.split(_STRETCH), m[element : element + count].split(_STRETCH), strict=True
                    ):
                        to.copy_(values * factor)


_STRETCH = 1 << 18
"""Elements that are converted at a time, so that what is allocated on the way is small."""


def _fade(runs: Tensor, factors: Sequence[float], memory: Tensor, shift: int, scales: Tensor) -> None:
    for (element, _, count, _, _, shard), factor in zip(runs.tolist(), factors, strict=True):
        for c in memory[element - shift : element - shift + count].split(_STRETCH):
            values = c.to(torch.float32)
            said = torch.where(values >= 0, scales[shard], -scales[shard])
            c.copy_((values - said) * factor)

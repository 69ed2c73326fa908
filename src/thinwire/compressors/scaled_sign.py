"""The scaled sign: one bit per element, one scale per shard, and a residual.

A vector `c` is sent as `s·sign(c)`, with `s = ‖c‖₂/√len` for each shard. The residual `e = c - s·sign(c)` stays with
the sender and is added to what it sends next. The scale is known only after a pass over all of `c`, and writing `e`
would take a second one. So the sender keeps `c` and the scale, and the next pass subtracts on the fly. docs/protocol.md
has the rules.
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
    ) -> None:
        self._layout = layout
        self._kernels = kernels
        self._codec = Sign(kernels)
        self.sent = untouched_zeros(layout.own_size, dtype, layout.device) if memory is None else memory
        """The last `c` of this rank's slices."""
        self._owned = OwnedRuns(layout, node)
        self.sent_scales = torch.zeros(layout.shards, dtype=torch.float32, device=layout.device)
        self.answer_scales = torch.zeros(layout.shards, dtype=torch.float32, device=layout.device)
        self.answer = untouched_zeros(layout.size // WORD, torch.int64, layout.device)
        """The signs of the last answer, equal on all ranks; `answer_scales` are their scales."""
        self.answered = untouched_zeros(self._owned.size, dtype, layout.device)
        """The last `y` of the shards that this rank owns: the mean of all workers plus the residual."""
        self.previous_answer = (
            untouched_zeros(layout.size // WORD, torch.int64, layout.device) if keep_previous else None
        )
        self.previous_answer_scales = torch.zeros_like(self.answer_scales) if keep_previous else None
        self.payload = payload_of(self._codec)
        self._owner_sums = [
            torch.zeros(len(table), 1, dtype=torch.float64, device=layout.device) for table in self._owned.tables
        ]

    def bind(self, buffers: PacketBuffers) -> None:
        """See `Compressor`."""
        self._packets = SignPackets(buffers, self._codec, 1)

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
        """Update the momentum `m` with the gradient, and add `rate · m` to what is sent now or later."""
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
        """Answer with the scaled sign of the mean plus the residual of the last answer."""
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

    def state(self) -> State:
        """See `Compressor`."""
        state = State(
            own={"sent": self.sent},
            owned={"answered": self.answered},
            words={"answer": self.answer},
            shards={"sent_scale": self.sent_scales, "answer_scale": self.answer_scales},
        )
        if self.previous_answer is not None and self.previous_answer_scales is not None:
            state.words["answer_before"] = self.previous_answer
            state.shards["answer_scale_before"] = self.previous_answer_scales
        return state

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
            _scale_residual(runs, [factors[position] for position in owners], self.answered, shift, self.answer_scales)
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


def _scale_residual(runs: Tensor, factors: Sequence[float], memory: Tensor, shift: int, scales: Tensor) -> None:
    for (element, _, count, _, _, shard), factor in zip(runs.tolist(), factors, strict=True):
        for c in memory[element - shift : element - shift + count].split(_CHUNK):
            values = c.to(torch.float32)
            sent = torch.where(values >= 0, scales[shard], -scales[shard])
            c.copy_((values - sent) * factor)

"""Gradient averaging with any codec: what an encoding leaves out stays with its sender and is part of the next message.

A worker adds its gradient to its residual `e` and sends the encoding of the sum; what the encoding left out is the new
residual. The owner of a shard does the same with the mean of the decoded packets and a residual `r` of its own::

    c = e + g,  send C(c),  e = c - C(c)                        on each worker
    y = r + mean of C(c),  answer D(y),  r = y - D(y)           at the owner

Without a residual, `e` or `r` is zero instead: for unbiased codecs, or for exact answers. The residual of a message is
computed from the bytes that were sent, so that sent + kept = wanted, up to one rounding per element.

F. Seide, H. Fu, J. Droppo, G. Li, D. Yu: "1-bit stochastic gradient descent and its application to data-parallel
distributed training of speech DNNs", Interspeech 2014, introduced the residual, on both sides.
S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi: "Error feedback fixes signSGD and other gradient compression
schemes", ICML 2019, proved that it keeps the convergence rate of SGD for every contraction.
H. Tang, C. Yu, X. Lian, T. Zhang, J. Liu: "DoubleSqueeze: parallel stochastic gradient descent with double-pass
error-compensated compression", ICML 2019, did so for residuals at workers and owners.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.compressors._answers import Answers, longest_shard
from thinwire.compressors._gradient_sums import GradientSums
from thinwire.compressors._lost_share import LostShare
from thinwire.compressors._packets import OwnedRuns, bytes_of, naming_packet, words_of
from thinwire.compressors._padding import padding_of
from thinwire.compressors.codecs import Codec, RandomCodec
from thinwire.compressors.gradient_compressor import GradientCompressor
from thinwire.kernels import rng
from thinwire.kernels.modes import Scale
from thinwire.kernels.ops import Kernels
from thinwire.transport.buffers import Frame, PacketBuffers, Part, Payload
from thinwire.transport.layout import Layout
from thinwire.transport.memory import untouched_zeros
from thinwire.transport.state import State


class ErrorFeedback(GradientCompressor):
    """Averages gradients with a codec for packets and one for answers, shard by shard.

    Memory per rank: 4 bytes per element of its slices, with or without a residual, in which gradients are summed until
    a bucket is complete; 4 bytes per element of the shards that it owns if owners keep a residual.

    Args:
        layout: the flat space.
        node: the number of this rank's worker.
        kernels: the backend.
        up: makes a codec for packets. It is called twice, because workers encode while owners decode.
        down: makes a codec for answers. It is called once.
        worker_residual: whether workers keep what their packets leave out.
        owner_residual: whether owners keep what their answers leave out.
        sums: whether owners encode the sum of the packets instead of their mean. This is for codecs that ignore the
            size of what they encode.
        seed: the seed of codecs with random numbers; the same on all ranks.
    """

    def __init__(
        self,
        layout: Layout,
        node: int,
        kernels: Kernels,
        up: Callable[[], Codec],
        down: Callable[[], Codec],
        *,
        worker_residual: bool = True,
        owner_residual: bool = True,
        sums: bool = False,
        seed: int = 0,
    ) -> None:
        self._node, self._kernels, self._seed, self._step = node, kernels, seed, 0
        self._up, self._received, self._down = up(), up(), down()
        self._has_worker_residual, self._has_owner_residual = worker_residual, owner_residual
        self._weight = 1.0 if sums else 1.0 / layout.workers
        self._sums = GradientSums(layout, kernels)
        self.residual = self._sums.flat
        """What the packets of this rank have left out, of its slices; during an exchange, with the gradient."""
        self._owned = OwnedRuns(layout, node)
        self._padding = padding_of(layout)
        size = self._owned.size if owner_residual else longest_shard(layout)
        self.answer_residual = untouched_zeros(size, torch.float32, layout.device)
        """What the answers of this rank have left out, of the shards that it owns."""
        self._lost = LostShare(layout.shards)
        self._answers = Answers(layout, self._down)

    @property
    def payload(self) -> Payload:
        """See `Compressor`."""
        return Payload(
            up_words=lambda shard_words: words_of(self._up, shard_words),
            down_words=lambda shard_words: words_of(self._down, shard_words),
        )

    def bind(self, buffers: PacketBuffers) -> None:
        """See `Compressor`."""
        self._answers.bind(buffers)

    def begin_step(self, step: int) -> None:
        """See `GradientCompressor`."""
        self._step = step
        self._answers.forget()

    def encode(self, part: Part, grad: Tensor | None, scale: Scale) -> bool | None:
        """See `GradientCompressor`."""
        return self._sums.add(part, grad, scale)

    def seal(self, frame: Frame) -> None:
        """Encode the sums of a bucket, and keep what the encodings leave out."""
        bucket = frame.bucket
        for row, shard in enumerate(bucket.own_shards):
            number, values = bucket.shard_number(shard), self._sums.shard(bucket, row)
            packet = bytes_of(frame.sent[row], self._up, bucket.shard_elements)
            wanted = self._kernels.square_sum(values)
            self._use_keys(self._up, number, rng.WORKER_STREAM, self._step, self._node, number)
            self._up.encode(values, packet)
            self._up.decode(packet, values, -1.0)
            self._sums.clear_padding(bucket, row)
            self._lost.note(number, wanted, self._kernels.square_sum(values))
            if not self._has_worker_residual:
                values.zero_()

    def merge(self, frame: Frame, shard: int) -> None:
        """Answer with the encoding of the mean, or the sum, of the packets and the residual."""
        bucket, length = frame.bucket, frame.bucket.shard_elements
        number, workers = bucket.shard_number(shard), frame.received.shape[0]
        first = bucket.start + shard * length - bucket.shift_of(self._owned.shards) if self._has_owner_residual else 0
        values = self.answer_residual[first : first + length]
        self._use_answer_keys(self._received, number)
        for worker in range(workers):
            with naming_packet(f"the packet of worker {worker} for bucket {bucket.index}"):
                packet = bytes_of(frame.received[worker], self._received, length)
                self._received.decode(packet, values, self._weight)
        values.index_fill_(0, self._padding[number], 0.0)
        self._use_answer_keys(self._down, number)
        answer = bytes_of(frame.answers[shard], self._down, length)
        self._down.encode(values, answer)
        if self._has_owner_residual:
            self._down.decode(answer, values, -1.0)
            values.index_fill_(0, self._padding[number], 0.0)
        else:
            values.zero_()

    def read_answers(self) -> None:
        """See `GradientCompressor`."""
        self._answers.forget()

    def decode(self, part: Part, into: Tensor) -> None:
        """See `GradientCompressor`."""
        self._answers.read(part, into, functools.partial(self._use_answer_keys, self._down))

    def rescale(self, factor: float) -> None:
        """See `GradientCompressor`."""
        self.residual.mul_(factor)
        if self._has_owner_residual:
            self.answer_residual.mul_(factor)

    def contraction(self) -> float:
        """See `GradientCompressor`."""
        return self._lost.read()

    def state(self) -> State:
        """See `Compressor`."""
        return State(
            own={"residual": self.residual} if self._has_worker_residual else {},
            owned={"answer_residual": self.answer_residual} if self._has_owner_residual else {},
        )

    def _use_answer_keys(self, codec: Codec, number: int) -> None:
        self._use_keys(codec, number, rng.OWNER_STREAM, self._step, number)

    def _use_keys(self, codec: Codec, number: int, *own: int) -> None:
        """Set the keys of a codec for a shard, given the numbers that set this sender apart from others."""
        if isinstance(codec, RandomCodec):
            shared = rng.key(self._seed, rng.SHARED_STREAM, self._step, number)
            codec.use_keys(rng.key(self._seed, *own), shared)

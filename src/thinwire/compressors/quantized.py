"""Blockwise quantisation: one to eight bits per value, one scale per block, and a residual.

A block of values `c` becomes a scale `s`, stored as bfloat16, and one code per value. With 3, 4 and 8 bits::

    L = 2^(bits-1) - 1        s = max|c| / L        q = round(c / s) in [-L, L]        value = q·s

With 1 and 2 bits no level is zero, and the scale follows the mean magnitude, because few levels over the full range
would lose most values::

    s = spread · mean|c|      value = (floor(c / s) + 1/2)·s, limited to 2^bits levels

Error feedback (Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
Training of Speech DNNs", Interspeech 2014; Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", ICML 2019): `c` is the gradient plus the residual `e`, and `e ← c - value` stays with the sender.
Workers do this with their gradients, and owners with the mean of the workers' values.

Bits per value: `bits + 16/block`, in each direction; 4.25 for int4 with blocks of 64. Memory: a residual of 4 bytes per
parameter at each worker and 4/n at its owners (2 and 2/n with `residual_dtype=torch.bfloat16`), and the packets.

When not to use it: if gradients are mostly zero, such as those of large embeddings, top-k sends less. With 1 or 2 bits
per value compare with AdamW on your own task first; docs/convergence.md has the comparison.

Differences from the papers: the scale belongs to a block of 16, 32 or 64 values of one parameter, not to a column or a
tensor. Both directions are compressed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compressors._packets import OwnedRuns
from thinwire.compressors.gradient_compressor import Scheme
from thinwire.kernels.modes import Scale
from thinwire.kernels.ops import Kernels
from thinwire.transport.buffers import WORD_BYTES, Frame, PacketBuffers, Part, Payload
from thinwire.transport.layout import WORD, Layout
from thinwire.transport.memory import untouched_zeros
from thinwire.transport.state import State

BLOCKS = (16, 32, 64)
_SCALE_BYTES = 2
_SPREAD = {1: 2.0, 2: 1.55}
"""By the number of bits, the distance between two levels as a multiple of the mean magnitude."""


@dataclass(frozen=True)
class QuantizedScheme(Scheme):
    """Blockwise quantisation; see the module.

    Args:
        bits: 1, 2, 3, 4 or 8 per value.
        block: the number of values that share a scale: 16, 32 or 64.
        error_feedback: whether to keep residuals. Without them the error of each step is lost.
        residual_dtype: the dtype of the residuals, torch.float32 or torch.bfloat16.
    """

    bits: int
    block: int = 64
    error_feedback: bool = True
    residual_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.block not in BLOCKS:
            raise ValueError(f"block={self.block!r}: expected 16, 32 or 64 values per scale")
        if not isinstance(self.error_feedback, bool):
            raise ValueError(f"error_feedback={self.error_feedback!r}: expected True or False")
        if self.residual_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"residual_dtype={self.residual_dtype!r}: expected torch.float32 or torch.bfloat16")

    @property
    def word_bytes(self) -> int:
        """The bytes of a word of 64 values: its scales, then its codes."""
        return _SCALE_BYTES * (WORD // self.block) + WORD * self.bits // 8

    @property
    def spread(self) -> float:
        """The distance between two levels, as a multiple of the mean magnitude. With 3 bits and more it is unused."""
        return _SPREAD.get(self.bits, 1.0)

    def bits_per_value(self, workers: int) -> tuple[float, float]:
        """See `Scheme`."""
        bits = 8 * self.word_bytes / WORD
        return bits, bits

    def bind(self, layout: Layout, node: int, kernels: Kernels) -> Quantized:
        """See `Scheme`."""
        return Quantized(self, layout, node, kernels)


class Quantized:
    """Workers send quantised gradients, and owners answer with their quantised mean, in the same memory.

    Args:
        scheme: the options.
        layout: the flat space.
        node: the number of this rank's worker.
        kernels: the backend.
    """

    def __init__(self, scheme: QuantizedScheme, layout: Layout, node: int, kernels: Kernels) -> None:
        self._kernels = kernels
        self._owned = OwnedRuns(layout, node, scheme.word_bytes)
        self._format = {"bits": scheme.bits, "block": scheme.block}
        self._rule = {**self._format, "spread": scheme.spread}
        dtype, device = scheme.residual_dtype, layout.device
        self.residual = untouched_zeros(layout.own_size, dtype, device) if scheme.error_feedback else None
        """What this worker has not sent yet, of its slices."""
        self.answer_residual = untouched_zeros(self._owned.size, dtype, device) if scheme.error_feedback else None
        """What this rank has not answered yet, of the shards that it owns."""
        words = payload_words(scheme.word_bytes)
        self.payload = Payload(
            up_words=words,
            down_words=words,
            word_bytes=scheme.word_bytes,
            in_place=True,
            receive_window=_three_quarters,
        )

    def bind(self, buffers: PacketBuffers) -> None:
        """See `Compressor`."""
        self._packets, self._answers = buffers.sent, buffers.answers
        parts = [part for parts in buffers.parts for part in parts]
        counts = [part.up_runs.shape[0] for part in parts]
        self._all_sums = torch.zeros(sum(counts), 2, dtype=torch.float64, device=buffers.layout.device)
        self._sums = list(self._all_sums.split(counts))
        """For each part, the squared norms of what its runs were to send and of what they lost."""
        self._encode_unscaled = [self._prepared_encode(part) for part in parts]
        self._decode = [self.decoder(part.down_runs, self._answers) for part in parts]

    def _prepared_encode(self, part: Part) -> Callable[[Tensor], bool | None]:
        return self._kernels.prepared(
            "quantize_encode",
            "grad",
            runs=part.up_runs,
            residual=self.residual,
            packets=self._packets,
            sums=self._sums[part.index],
            scale=1.0,
            shift=part.frame.bucket.state_shift,
            **self._rule,
        )

    def begin_step(self, step: int) -> None:
        """See `GradientCompressor`."""

    def encode(self, part: Part, grad: Tensor | None, scale: Scale) -> bool | None:
        """See `GradientCompressor`. Without a gradient it sends zeros and keeps the residual: if no rank has a gradient
        for the parameter, DDP does not use the answer."""
        joined = part.index < 0
        if grad is not None and scale == 1.0 and not joined:
            return self._encode_unscaled[part.index](grad)
        return self._kernels.quantize_encode(
            part.up_runs,
            grad,
            None if grad is None else self.residual,
            self._packets,
            sums=self._all_sums[part.rows] if joined else self._sums[part.index],
            scale=scale,
            shift=part.frame.bucket.state_shift,
            **self._rule,
        )

    def seal(self, frame: Frame) -> None:
        """See `Compressor`."""

    def merge(self, frame: Frame, shard: int) -> None:
        """See `Compressor`."""
        bucket = frame.bucket
        self._kernels.quantize_merge(
            self._owned.tables[bucket.index],
            frame.received,
            self.answer_residual,
            frame.answers[shard],
            shift=bucket.shift_of(self._owned.shards),
            **self._rule,
        )

    def read_answers(self) -> None:
        """See `GradientCompressor`."""

    def decoder(self, runs: Tensor, answers: Tensor) -> Callable[[Tensor], None]:
        """See `PlacedAnswers`."""
        return self._kernels.prepared("quantize_decode", "out", runs=runs, packets=answers, weight=1.0, **self._format)

    def decode(self, part: Part, into: Tensor) -> None:
        """See `GradientCompressor`."""
        if part.index < 0:
            self._kernels.quantize_decode(part.down_runs, self._answers, into, weight=1.0, **self._format)
        else:
            self._decode[part.index](into)

    def rescale(self, factor: float) -> None:
        """See `GradientCompressor`."""
        for residual in (self.residual, self.answer_residual):
            if residual is not None:
                residual.mul_(factor)

    def contraction(self) -> float:
        """See `GradientCompressor`."""
        wanted, lost = self._all_sums.sum(0).tolist()
        return lost / wanted if wanted > 0 else math.nan

    def state(self) -> State:
        """See `Compressor`."""
        if self.residual is None or self.answer_residual is None:
            return State()
        return State(own={"residual": self.residual}, owned={"answer_residual": self.answer_residual})


def _three_quarters(buckets: int) -> int:
    # All of them would keep a slow link a little busier. But then int4 needs more than 6 bytes per parameter.
    return -(-3 * buckets // 4)


def payload_words(word_bytes: int) -> Callable[[int], int]:
    """The words of a packet, given those of a shard, each of which takes so many bytes."""

    def words(shard_words: int) -> int:
        return -(-shard_words * word_bytes // WORD_BYTES)

    return words

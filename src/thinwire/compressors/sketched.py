"""The scheme `count_sketch`: workers send sketches, whose sum tells the owner the largest elements of the mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire._checks import check_seed, is_integer, is_number
from thinwire.compressors._answers import Answers, longest_shard
from thinwire.compressors._gradient_sums import GradientSums
from thinwire.compressors._packets import bytes_of, words_of
from thinwire.compressors._padding import padding_of
from thinwire.compressors.codecs.count_sketch import MAX_COLUMNS, MAX_ELEMENTS, MAX_ROWS, CountSketch
from thinwire.compressors.codecs.topk import TopK, check_ratio
from thinwire.compressors.gradient_compressor import GradientCompressor, Scheme
from thinwire.compressors.topk import ENTRY_BITS
from thinwire.kernels.modes import Scale
from thinwire.kernels.ops import Kernels
from thinwire.transport.buffers import WORD_BYTES, Frame, PacketBuffers, Part, Payload
from thinwire.transport.layout import WORD, Layout
from thinwire.transport.memory import untouched_zeros
from thinwire.transport.state import State

_FLOAT_BYTES = torch.float32.itemsize


class Sketched(GradientCompressor):
    """Averages gradients through count sketches, one per shard. Momentum and residual are sketches at the owner.

    Args:
        layout: the flat space.
        node: the number of this rank's worker.
        kernels: the backend.
        ratio: the fraction of elements in an answer.
        cells: the number of cells of a sketch per element of its shard.
        rows: the number of rows of a sketch.
        momentum: the factor of the momentum at each step.
        seed: the seed of the hashes.

    Raises:
        ValueError: if a shard has more elements than a sketch can distinguish.
    """

    def __init__(
        self,
        layout: Layout,
        node: int,
        kernels: Kernels,
        *,
        ratio: float,
        cells: float,
        rows: int,
        momentum: float,
        seed: int,
    ) -> None:
        if longest_shard(layout) > MAX_ELEMENTS:
            raise ValueError(
                f"a shard of {longest_shard(layout)} elements: a count sketch distinguishes at most {MAX_ELEMENTS}"
            )
        self._cells, self._rows, self._seed, self._kernels = cells, rows, seed, kernels
        self._momentum = momentum
        self._sketches: dict[int, CountSketch] = {}
        self._top = TopK(kernels, ratio)
        self._sums = GradientSums(layout, kernels)
        self._padding = padding_of(layout)
        self._values = torch.empty(longest_shard(layout), dtype=torch.float32, device=layout.device)
        self._answers = Answers(layout, self._top)
        floats = max((self._floats(bucket.shard_elements) for bucket in layout.buckets), default=0)

        def tables() -> Tensor:
            return untouched_zeros(layout.shards * floats, torch.float32, layout.device).view(layout.shards, floats)

        self.error_tables = tables()
        """Sketches of what answers have left out, one row per shard; zeros for the shards of other owners."""
        self.momentum_tables = tables() if momentum else None
        """The same for the momentum."""

    @property
    def payload(self) -> Payload:
        """See `Compressor`."""
        return Payload(
            up_words=lambda shard_words: self._sketch(WORD * shard_words).nbytes(WORD * shard_words) // WORD_BYTES,
            down_words=lambda shard_words: words_of(self._top, shard_words),
        )

    def bind(self, buffers: PacketBuffers) -> None:
        """See `Compressor`."""
        self._answers.bind(buffers)

    def begin_step(self, step: int) -> None:
        """See `GradientCompressor`."""
        self._answers.forget()

    def encode(self, part: Part, grad: Tensor | None, scale: Scale) -> bool | None:
        """See `GradientCompressor`."""
        return self._sums.add(part, grad, scale)

    def seal(self, frame: Frame) -> None:
        """Sketch the gradients of a bucket."""
        bucket = frame.bucket
        sketch = self._sketch(bucket.shard_elements)
        for row in range(len(bucket.own_shards)):
            values = self._sums.shard(bucket, row)
            sketch.encode(values, bytes_of(frame.sent[row], sketch, bucket.shard_elements))
            values.zero_()

    def merge(self, frame: Frame, shard: int) -> None:
        """Add the mean of the sketches to the momentum and the residual, and answer with the largest estimates."""
        bucket, length = frame.bucket, frame.bucket.shard_elements
        number, sketch = bucket.shard_number(shard), self._sketch(frame.bucket.shard_elements)
        error = self.error_tables[number, : self._floats(length)]
        into = error
        if self.momentum_tables is not None:
            into = self.momentum_tables[number, : self._floats(length)].mul_(self._momentum)
        for packet in frame.received:
            table = bytes_of(packet, sketch, length).view(torch.float32)
            into.add_(table, alpha=1.0 / frame.received.shape[0])
        if into is not error:
            error.add_(into)
        values, packet = self._values[:length].zero_(), error.view(torch.uint8)
        sketch.decode(packet, values)
        values.index_fill_(0, self._padding[number], 0.0)
        answer = bytes_of(frame.answers[shard], self._top, length)
        self._top.encode(values, answer)
        self._top.decode(answer, values.zero_(), -1.0)
        sketch.add(values, packet)

    def read_answers(self) -> None:
        """See `GradientCompressor`."""
        self._answers.forget()

    def decode(self, part: Part, into: Tensor) -> None:
        """See `GradientCompressor`."""
        self._answers.read(part, into)

    def rescale(self, factor: float) -> None:
        """See `GradientCompressor`."""
        for tables in self.state().shards.values():
            tables.mul_(factor)

    def contraction(self) -> float:
        """NaN: a sketch alone does not determine what is lost."""
        return math.nan

    def state(self) -> State:
        """See `Compressor`."""
        tables = {"sketch_error": self.error_tables}
        if self.momentum_tables is not None:
            tables["sketch_momentum"] = self.momentum_tables
        return State(shards=tables)

    def _sketch(self, length: int) -> CountSketch:
        if length not in self._sketches:
            columns = min(max(int(self._cells * length / self._rows), 1), MAX_COLUMNS)
            self._sketches[length] = CountSketch(self._kernels, self._rows, columns, self._seed)
        return self._sketches[length]

    def _floats(self, length: int) -> int:
        return self._sketch(length).nbytes(length) // _FLOAT_BYTES


@dataclass(frozen=True)
class CountSketchScheme(Scheme):
    """Sketched-SGD: workers send count sketches, and the owner answers with the largest elements of their mean.

    N. Ivkin, D. Rothchild, E. Ullah, V. Braverman, I. Stoica, R. Arora: "Communication-efficient distributed SGD with
    sketching", NeurIPS 2019.
    D. Rothchild, A. Panda, E. Ullah, N. Ivkin, I. Stoica, V. Braverman, J. Gonzalez, R. Arora: "FetchSGD:
    communication-efficient federated learning with sketching", ICML 2020: momentum and residual in sketches.

    With the sketch S and its estimate U, the owner of a shard computes::

        u = momentum·u + mean of S(g),  e = e + u,  answer Δ = top-k of U(e),  e = e - S(Δ)

    Sketches are linear, so `e` is the sketch of what answers have left out. Workers keep nothing.

    Bits per value: 32·cells up, 64·ratio down.
    Memory: 4 bytes per element in which gradients are summed until a bucket is complete, not saved. 4·cells/n bytes
    per element at the owners; twice that with momentum.

    When not to use it: for gradients without large elements. An estimate has an error of about ‖e‖/√columns, and what
    is smaller is noise: the residual can then grow. If workers can keep a residual, `gtopk` has exact values for fewer
    bytes.

    Differences from the papers: one sketch per shard; k of each. Values are the estimates, as in FetchSGD; Sketched-SGD
    asks the workers for exact values in a second round. Without the learning rate, which the user's optimizer applies
    after the exchange. The momentum of answered elements is not masked.

    Args:
        ratio: the fraction of elements in an answer, in (0, 1].
        cells: the number of cells of a sketch per element, in (0, 0.5].
        rows: the number of independent estimates per element, from 1 to 15.
        momentum: the factor of the momentum at each step, in [0, 1); 0 if the optimizer has its own.
        seed: the seed of the hashes; the same on all ranks.

    Raises:
        ValueError: if an argument is out of range.
    """

    state_depends_on_buckets = True

    ratio: float = 0.01
    cells: float = 0.1
    rows: int = 5
    momentum: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if not is_number(self.cells) or not 0 < self.cells <= 0.5:
            raise ValueError(f"cells={self.cells!r}: expected a number in (0, 0.5], the cells of a sketch per element")
        if not is_integer(self.rows, 1, MAX_ROWS):
            raise ValueError(f"rows={self.rows!r}: expected an integer from 1 to {MAX_ROWS}")
        if not is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum!r}: expected a number in [0, 1)")
        check_seed(self.seed)

    def bind(self, layout: Layout, node: int, kernels: Kernels) -> Sketched:
        """See `Scheme`."""
        return Sketched(
            layout,
            node,
            kernels,
            ratio=self.ratio,
            cells=self.cells,
            rows=self.rows,
            momentum=self.momentum,
            seed=self.seed,
        )

    @property
    def worker_residual(self) -> bool:
        """See `Scheme`."""
        return False

    def bits_per_value(self, workers: int) -> tuple[float, float]:
        """See `Scheme`."""
        return 32 * self.cells, ENTRY_BITS * self.ratio

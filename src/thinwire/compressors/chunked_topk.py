"""The scheme `chunked_topk`: the largest elements of each chunk, at 14 bits per entry."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compressors.codecs._entries import CHUNK, bits_per_value
from thinwire.compressors.codecs.chunked_topk import VALUE_BITS, ChunkedTopK, check_entries
from thinwire.compressors.error_feedback import ErrorFeedback
from thinwire.compressors.gradient_compressor import Scheme
from thinwire.kernels.ops import Kernels
from thinwire.transport.layout import Layout


@dataclass(frozen=True)
class ChunkedTopKScheme(Scheme):
    """Chunked top-k: the k largest elements of each chunk of 4,096, with indices of 12 bits and values of 2 bits.

    B. Peng, J. Quesnelle, D. P. Kingma: "DeMo: decoupled momentum optimization", arXiv 2411.19870, 2024.
    A. Sarfi, B. Thérien, J. Lidin, E. Belilovsky: "Communication efficient LLM pre-training with SparseLoCo",
    arXiv 2508.15706, 2025.

    Of each chunk of `c = e + g` a worker sends the k largest elements, rounded to ±s or ±s/3 with one scale s per
    chunk, and keeps the rest. The owner does the same with the mean of the packets and its residual. Elements below a
    sixth of the chunk's largest are not sent. At least the fraction 0.64/(1 + (k - 1)/36)·k/4096 of ‖c‖² is sent.

    Workers whose largest elements are at different places send n·k of them together. With `union=True` the answer has
    room for all, as in the papers. Otherwise it has the k largest, the rest waits at the owner, and what a worker
    receives does not grow with n.

    Bits per value: (14·k + 32)/4096 up and down; 0.227 for k = 64. With `union`, (14·min(n·k, 4096) + 32)/4096 down.
    Memory: residuals of 4 bytes per element at the workers, and 4/n at the owners.

    When not to use it: with models of few thousand parameters, whose shards fill no chunk.

    Differences from the papers: chunks of the flat space, without DeMo's cosine transform and without its momentum.
    SparseLoCo sends differences of parameters after many local steps; these are gradients. The answer is compressed
    as well; in both papers, all workers receive all packets.

    Args:
        k: the number of elements that is sent of each chunk, a multiple of 4 up to 4096.
        union: answer with n·k elements of each chunk for n workers, instead of k.

    Raises:
        ValueError: if an argument is out of range.
    """

    k: int = 64
    union: bool = False

    def __post_init__(self) -> None:
        check_entries(self.k)
        if not isinstance(self.union, bool):
            raise ValueError(f"union={self.union!r}: expected True or False")

    def bind(self, layout: Layout, node: int, kernels: Kernels) -> ErrorFeedback:
        """See `Scheme`."""

        return ErrorFeedback(
            layout,
            node,
            kernels,
            lambda: ChunkedTopK(self.k),
            lambda: ChunkedTopK(self._answered(layout.workers)),
        )

    def bits_per_value(self, workers: int) -> tuple[float, float]:
        """See `Scheme`."""
        return bits_per_value(self.k, VALUE_BITS), bits_per_value(self._answered(workers), VALUE_BITS)

    def _answered(self, workers: int) -> int:
        return min(workers * self.k, CHUNK) if self.union else self.k

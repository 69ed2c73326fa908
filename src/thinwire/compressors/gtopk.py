"""The scheme `gtopk`: workers send their largest elements, and owners answer with the largest of their mean."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compressors.codecs.topk import TopK, check_ratio
from thinwire.compressors.error_feedback import ErrorFeedback
from thinwire.compressors.gradient_compressor import Scheme
from thinwire.compressors.topk import ENTRY_BITS
from thinwire.kernels.ops import Kernels
from thinwire.transport.layout import Layout


@dataclass(frozen=True)
class GlobalTopKScheme(Scheme):
    """Global top-k: top-k in both directions, so that answers do not grow with the number of workers.

    S. Shi, Q. Wang, K. Zhao, Z. Tang, Y. Wang, X. Huang, X. Chu: "A distributed synchronous SGD algorithm with global
    top-k sparsification for low bandwidth networks", ICDCS 2019.

    Of `c = e + g` a worker sends the k = ⌈ratio·d⌉ largest elements, and the owner answers with the k largest of the
    mean of the packets plus its own residual. Each loses at most 1 - k/d of the squared norm.

    Bits per value: 64·ratio up and down.
    Memory: residuals of 4 bytes per element at the workers, and 4/n at the owners.

    When not to use it: with two or three workers, where `topk` has exact answers for few more bytes.

    Differences from the paper: an owner merges each shard, in place of a tree of ranks. Entries that the answer leaves
    out stay in the owner's residual; in the paper, they return to the workers that sent them.

    Args:
        ratio: the fraction of elements that is sent, in (0, 1].

    Raises:
        ValueError: if `ratio` is not in (0, 1].
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def bind(self, layout: Layout, node: int, kernels: Kernels) -> ErrorFeedback:
        """See `Scheme`."""

        def codec() -> TopK:
            return TopK(kernels, self.ratio)

        return ErrorFeedback(layout, node, kernels, codec, codec)

    def bits_per_value(self, workers: int) -> tuple[float, float]:
        """See `Scheme`."""
        return ENTRY_BITS * self.ratio, ENTRY_BITS * self.ratio

"""The scheme `topk`: workers send their largest elements, and the answer has all of them."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compressors.codecs.topk import TopK, Union, check_ratio
from thinwire.compressors.error_feedback import ErrorFeedback
from thinwire.compressors.gradient_compressor import Scheme
from thinwire.kernels.ops import Kernels
from thinwire.transport.layout import Layout

ENTRY_BITS = 64
"""An index of 32 bits and a float32."""


@dataclass(frozen=True)
class TopKScheme(Scheme):
    """Top-k with memory: each worker sends the largest elements of its gradient plus residual, as indices and values.

    S. U. Stich, J.-B. Cordonnier, M. Jaggi: "Sparsified SGD with memory", NeurIPS 2018.
    Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally: "Deep gradient compression: reducing the communication bandwidth for
    distributed training", ICLR 2018.

    Of `c = e + g` a worker sends the k = ⌈ratio·d⌉ elements with the largest magnitude and keeps the others:
    ‖c - C(c)‖² ≤ (1 - k/d)·‖c‖². The owner answers with the mean of the packets, exactly: the union of their entries.

    Bits per value: 64·ratio up; min(64·ratio·n, 32) down, because n workers may send n·k different elements.
    Memory: the workers' residual, 4 bytes per element.

    When not to use it: with many workers, whose union is dense; `gtopk` has answers of k elements. For gradients
    without large elements, where the residual delays most of the gradient by 1/ratio steps.

    Differences from the papers: k elements of each shard, not of each tensor. DGC also corrects the momentum of SGD,
    clips and warms up; here the optimizer is the user's.

    Args:
        ratio: the fraction of elements that a worker sends, in (0, 1].

    Raises:
        ValueError: if `ratio` is not in (0, 1].
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def bind(self, layout: Layout, node: int, kernels: Kernels) -> ErrorFeedback:
        """See `Scheme`."""
        return ErrorFeedback(
            layout,
            node,
            kernels,
            lambda: TopK(kernels, self.ratio),
            lambda: Union(kernels, self.ratio, layout.workers),
            owner_residual=False,
        )

    def bits_per_value(self, workers: int) -> tuple[float, float]:
        """See `Scheme`."""
        return ENTRY_BITS * self.ratio, min(ENTRY_BITS * self.ratio * workers, 32.0)

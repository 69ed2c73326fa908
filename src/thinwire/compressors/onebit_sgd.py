"""The scheme `onebit_sgd`: one bit per element, and the means of both halves of each block."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compressors.codecs.block_sign import HalfMeans, check_block
from thinwire.compressors.error_feedback import ErrorFeedback
from thinwire.compressors.gradient_compressor import Scheme
from thinwire.kernels.ops import Kernels
from thinwire.transport.layout import Layout


@dataclass(frozen=True)
class OneBitSGDScheme(Scheme):
    """1-bit SGD: each element becomes the mean of the elements of its block that have the same sign.

    F. Seide, H. Fu, J. Droppo, G. Li, D. Yu: "1-bit stochastic gradient descent and its application to data-parallel
    distributed training of speech DNNs", Interspeech 2014.

    `c = e + g` becomes μ₊ where c ≥ 0 and μ₋ elsewhere, the means of the two halves. The error is orthogonal to what is
    sent, in each half. Residuals on both sides, as in the paper.

    Bits per value: 1 + 64/block up and down.
    Memory: residuals of 4 bytes per element at the workers, and 4/n at the owners.

    When not to use it: with Adam, or with rows that have no gradient, as `sign`.

    Differences from the paper: blocks of the flat space in place of the columns of weight matrices; no dense warm-up;
    AdaGrad is applied where the user's optimizer is, after the exchange.

    Args:
        block: the number of elements that share the two means.

    Raises:
        ValueError: if `block` is out of range.
    """

    block: int = 512

    def __post_init__(self) -> None:
        check_block(self.block)

    def bind(self, layout: Layout, node: int, kernels: Kernels) -> ErrorFeedback:
        """See `Scheme`."""

        def codec() -> HalfMeans:
            return HalfMeans(self.block)

        return ErrorFeedback(layout, node, kernels, codec, codec)

    def bits_per_value(self, workers: int) -> tuple[float, float]:
        """See `Scheme`."""
        return 1.0 + 64 / self.block, 1.0 + 64 / self.block

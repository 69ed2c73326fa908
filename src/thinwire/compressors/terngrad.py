"""The scheme `terngrad`: each element becomes -s, 0 or s."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire._checks import check_seed
from thinwire.compressors.codecs.levels import NORM_BITS, Levels, check_levels, code_bits
from thinwire.compressors.error_feedback import ErrorFeedback
from thinwire.compressors.gradient_compressor import Scheme
from thinwire.kernels.ops import Kernels
from thinwire.transport.layout import Layout


@dataclass(frozen=True)
class TernGradScheme(Scheme):
    """TernGrad: each element becomes 0 or, with the probability |x|/s, ±s, where s is the largest of its block.

    W. Wen, C. Xu, F. Yan, C. Wu, Y. Wang, Y. Chen, H. Li: "TernGrad: ternary gradients to reduce communication in
    distributed deep learning", NeurIPS 2017.

    E[Q(x)] = x, and E‖Q(x) - x‖² = Σ|x|·(s - |x|).

    Bits per value: 2 + 32/block, up and down.
    Memory: none that is saved.

    When not to use it: with heavy-tailed gradients, where one element of a block makes the variance of all others
    large. It has no error feedback, because its variance exceeds ‖x‖² for ordinary gradients, and the residual would
    grow without limit.

    Differences from the paper: one scale per block in place of one per layer, which lowers the variance; no clipping
    at 2.5 standard deviations. The answer is made ternary again; in the paper, parameters are not sent, and the sum of
    n ternary gradients has 2·n + 1 levels.

    Args:
        block: the number of elements that share a scale.
        seed: the seed of the rounding; the same on all ranks.

    Raises:
        ValueError: if an argument is out of range.
    """

    block: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        check_levels(1, self.block, "max")
        check_seed(self.seed)

    def bind(self, layout: Layout, node: int, kernels: Kernels) -> ErrorFeedback:
        """See `Scheme`."""

        def codec() -> Levels:
            return Levels(1, self.block, "max")

        return ErrorFeedback(
            layout, node, kernels, codec, codec, worker_residual=False, owner_residual=False, seed=self.seed
        )

    @property
    def worker_residual(self) -> bool:
        """See `Scheme`."""
        return False

    def bits_per_value(self, workers: int) -> tuple[float, float]:
        """See `Scheme`."""
        bits = code_bits(1) + NORM_BITS / self.block
        return bits, bits

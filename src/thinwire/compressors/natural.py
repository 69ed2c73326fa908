"""The scheme `natural`: stochastic rounding to powers of two."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire._checks import check_seed
from thinwire.compressors._options import check_flag
from thinwire.compressors.codecs.natural import BITS, Natural
from thinwire.compressors.error_feedback import ErrorFeedback
from thinwire.compressors.gradient_compressor import Scheme
from thinwire.kernels.ops import Kernels
from thinwire.transport.layout import Layout


@dataclass(frozen=True)
class NaturalScheme(Scheme):
    """Natural compression: each element is rounded, up or down at random, to a power of two.

    S. Horváth, C.-Y. Ho, Ľ. Horváth, A. N. Sahu, M. Canini, P. Richtárik: "Natural compression for distributed deep
    learning", arXiv 1905.10988, 2019; MSML 2022.

    For 2^a ≤ |x| < 2^(a+1), the result is ±2^(a+1) with the probability |x|/2^a - 1, else ±2^a. E[C(x)] = x, and
    E‖C(x) - x‖² ≤ ‖x‖²/8. Numbers below 2^-126 become zero.

    Bits per value: 9 up and down, a sign and eight bits of exponent.
    Memory: none that is saved. With `error_feedback`, 4 bytes per element at the workers, and 4/n at the owners.

    When not to use it: where 9 bits are too many. Blocks of 8-bit integers have a much smaller error for fewer bits;
    powers of two keep the relative precision of every element, however small it is.

    Differences from the paper: the answer is compressed as well, with random numbers of the owner.

    Args:
        error_feedback: whether to keep what messages leave out.
        seed: the seed of the rounding; the same on all ranks.

    Raises:
        ValueError: if an argument is out of range.
    """

    error_feedback: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_flag("error_feedback", self.error_feedback)
        check_seed(self.seed)

    def bind(self, layout: Layout, node: int, kernels: Kernels) -> ErrorFeedback:
        """See `Scheme`."""
        return ErrorFeedback(
            layout,
            node,
            kernels,
            Natural,
            Natural,
            worker_residual=self.error_feedback,
            owner_residual=self.error_feedback,
            seed=self.seed,
        )

    def bits_per_value(self, workers: int) -> tuple[float, float]:
        """See `Scheme`."""
        return float(BITS), float(BITS)

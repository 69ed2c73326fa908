"""The scheme `qsgd`: stochastic rounding to a few levels per block."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire._checks import check_seed
from thinwire.compressors._options import check_flag
from thinwire.compressors.codecs.levels import NORM_BITS, Levels, Norm, check_levels, code_bits
from thinwire.compressors.error_feedback import ErrorFeedback
from thinwire.compressors.gradient_compressor import Scheme
from thinwire.kernels.ops import Kernels
from thinwire.transport.layout import Layout


@dataclass(frozen=True)
class QSGDScheme(Scheme):
    """QSGD: each element is rounded up or down at random, to a multiple of its block's norm divided by `levels`.

    D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic: "QSGD: communication-efficient SGD via gradient quantization
    and encoding", NeurIPS 2017.

    With the norm N of a block and s levels, |x| becomes ⌊s·|x|/N⌋·N/s, or one level more with the probability that
    makes the result unbiased: E[Q(x)] = x. For the Euclidean norm, E‖Q(x) - x‖² ≤ min(d/s², √d/s)·‖x‖² in a block of d
    elements. For the largest magnitude, the error of an element has a variance of at most N²/(4·s²).

    Bits per value: 2, 4 or 8 for s = 1, s ≤ 7 or s ≤ 127, plus 32/block, up and down.
    Memory: none that is saved. With `error_feedback`, 4 bytes per element at the workers, and 4/n at the owners.

    When not to use it: where a deterministic quantiser with error feedback fits, such as `int4`: the variance of
    random rounding costs steps. With `error_feedback` and few levels: the residual grows without limit if the variance
    exceeds ‖x‖², as in blocks where one element is much larger than all others.

    Differences from the paper: codes of fixed length in place of Elias codes. The answer is quantised again, with
    random numbers of the owner, so it is unbiased too. The paper's experiments use the largest magnitude and blocks of
    512, as the defaults do; its theorems use the Euclidean norm.

    Args:
        levels: the number of levels of each sign, from 1 to 127.
        block: the number of elements that share a norm.
        norm: "max" for the largest magnitude, "l2" for the Euclidean norm.
        error_feedback: whether to keep what messages leave out.
        seed: the seed of the rounding; the same on all ranks.

    Raises:
        ValueError: if an argument is out of range.
    """

    levels: int = 7
    block: int = 512
    norm: Norm = "max"
    error_feedback: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_levels(self.levels, self.block, self.norm)
        check_flag("error_feedback", self.error_feedback)
        check_seed(self.seed)

    def bind(self, layout: Layout, node: int, kernels: Kernels) -> ErrorFeedback:
        """See `Scheme`."""

        def codec() -> Levels:
            return Levels(self.levels, self.block, self.norm)

        return ErrorFeedback(
            layout,
            node,
            kernels,
            codec,
            codec,
            worker_residual=self.error_feedback,
            owner_residual=self.error_feedback,
            seed=self.seed,
        )

    def bits_per_value(self, workers: int) -> tuple[float, float]:
        """See `Scheme`."""
        bits = code_bits(self.levels) + NORM_BITS / self.block
        return bits, bits

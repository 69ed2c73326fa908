"""The scheme `signsgd`: workers vote with one bit per element, without memory."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire._checks import check_seed, is_number
from thinwire.compressors.codecs.block_sign import FixedSign
from thinwire.compressors.error_feedback import ErrorFeedback
from thinwire.compressors.gradient_compressor import Scheme
from thinwire.kernels.ops import Kernels
from thinwire.transport.layout import Layout


@dataclass(frozen=True)
class SignSGDScheme(Scheme):
    """signSGD with majority vote: the answer is the sign of the sum of the workers' signs, times a fixed scale.

    J. Bernstein, Y.-X. Wang, K. Azizzadenesheli, A. Anandkumar: "signSGD: compressed optimisation for non-convex
    problems", ICML 2018. J. Bernstein, J. Zhao, K. Azizzadenesheli, A. Anandkumar: "signSGD with majority vote is
    communication efficient and fault tolerant", ICLR 2019.

    Every element of the averaged gradient is ±scale, whatever its size. With SGD, the learning rate is then the length
    of each element's step, as in Adam: use 10 to 1,000 times less than for SGD. Clipping by norm changes all steps by
    the same factor. With Adam, all second moments become scale². `contraction` compares gradients with ±1, which says
    nothing here.

    Bits per value: 1 up and down.
    Memory: none that is saved.

    When not to use it: to train as the uncompressed optimizer does: the vote is biased where gradients are skewed, and
    has no error feedback; `sign` has. With rows that have no gradient: they receive random signs. Birder and
    DistributedLion vote too, and keep such rows where they are.

    Differences from the papers: ties, and the sign of zero, are decided at random, because one bit has no zero and a
    fixed choice would move parameters in one direction. No momentum at workers: the optimizer is the user's.

    Args:
        scale: the size of all elements of the answer.
        seed: the seed of random signs; the same on all ranks.

    Raises:
        ValueError: if an argument is out of range.
    """

    scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_number(self.scale) or self.scale <= 0:
            raise ValueError(f"scale={self.scale!r}: expected a positive number, the size of the averaged gradient")
        check_seed(self.seed)

    def bind(self, layout: Layout, node: int, kernels: Kernels) -> ErrorFeedback:
        """See `Scheme`."""
        return ErrorFeedback(
            layout,
            node,
            kernels,
            FixedSign,
            lambda: FixedSign(self.scale),
            worker_residual=False,
            owner_residual=False,
            sums=True,  # of ±1, which is exact: a tie is zero
            seed=self.seed,
        )

    @property
    def worker_residual(self) -> bool:
        """See `Scheme`."""
        return False

    def bits_per_value(self, workers: int) -> tuple[float, float]:
        """See `Scheme`."""
        return 1.0, 1.0

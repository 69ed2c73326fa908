"""The scheme `randomk`: all workers send the same random elements, without indices."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire._checks import check_seed
from thinwire.compressors.codecs.randomk import RandomK
from thinwire.compressors.codecs.topk import check_ratio
from thinwire.compressors.error_feedback import ErrorFeedback
from thinwire.compressors.gradient_compressor import Scheme
from thinwire.kernels.ops import Kernels
from thinwire.transport.layout import Layout


@dataclass(frozen=True)
class RandomKScheme(Scheme):
    """Random-k with memory: a random subset of the elements, which all ranks draw from the seed and the step.

    S. U. Stich, J.-B. Cordonnier, M. Jaggi: "Sparsified SGD with memory", NeurIPS 2018.

    Of `c = e + g` a worker sends k = ⌈ratio·d⌉ random elements and keeps the others. On average, it keeps the fraction
    1 - k/d of ‖c‖². The answer is the mean of the values that the workers sent, exactly.

    Bits per value: 32·ratio up and down.
    Memory: the workers' residual, 4 bytes per element.

    When not to use it: if `topk` fits the network. Random elements carry much less of the gradient than the largest
    ones, and an element waits 1/ratio steps on average. It suits networks where the bytes of indices matter, and CPUs
    that are too slow to select.

    Differences from the paper: one element of each of k ranges of equal length, in place of k elements of all. Padding
    counts, which is less than 64 elements per parameter.

    Args:
        ratio: the fraction of elements that is sent, in (0, 1].
        seed: the seed of the subsets; the same on all ranks.

    Raises:
        ValueError: if an argument is out of range.
    """

    ratio: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_seed(self.seed)

    def bind(self, layout: Layout, node: int, kernels: Kernels) -> ErrorFeedback:
        """See `Scheme`."""

        def codec() -> RandomK:
            return RandomK(kernels, self.ratio)

        return ErrorFeedback(layout, node, kernels, codec, codec, owner_residual=False, seed=self.seed)

    def bits_per_value(self, workers: int) -> tuple[float, float]:
        """See `Scheme`."""
        return 32 * self.ratio, 32 * self.ratio

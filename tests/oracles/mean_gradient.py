"""The mean gradient of a step that updates the variance: exact, or by quantised averaging with blocks of 64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.oracles.flat_space import FlatSpace, Gradient
from tests.oracles.quantized_averaging import QuantizedAveraging


class MeanGradient:
    """`bits` is None for exact means. A single worker sends nothing, so that nothing is quantised."""

    def __init__(self, space: FlatSpace, bits: int | None) -> None:
        sizes = [place.value.size for place in space.places]
        self.quantized: QuantizedAveraging | None = None
        if bits is not None and space.workers > 1:
            self.quantized = QuantizedAveraging(space.workers, sizes, bits, block=64, spread=1.0)

    def exchange(self, gradients: Sequence[Gradient]) -> tuple[list[np.ndarray], bool]:
        """The means, and whether all workers skip the step."""
        if self.quantized is None:
            return [g.mean for g in gradients], not all(g.finite for g in gradients)
        workers = range(len(gradients[0].present))
        sent = [
            [g.of_workers[worker].astype(np.float32) if g.present[worker] else None for g in gradients]
            for worker in workers
        ]
        means = self.quantized.exchange(sent)
        return [mean.astype(np.float64) for mean in means], self.quantized.unfit

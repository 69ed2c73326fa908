"""Quantised averaging of gradients, literally: n workers in one process, parameter after parameter, in NumPy.

Scales belong to blocks that begin at the start of a parameter, and shards begin at whole words, so the result does
not depend on buckets and shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.oracles.flat_space import TOO_LARGE
from tests.oracles.quantize import Floats, encode


class QuantizedAveraging:
    """The residuals of all workers and owners, and one exchange after another.

    `gradients` of an exchange has for each worker the gradients of all parameters, flat; None where it has none.
    """

    def __init__(
        self,
        workers: int,
        numels: Sequence[int],
        bits: int,
        block: int,
        spread: float,
        *,
        error_feedback: bool = True,
        decay: float = 1.0,
    ) -> None:
        self.rule = bits, block, spread
        self.error_feedback = error_feedback
        self.decay = np.float32(decay)
        self.unfit = False
        """Whether a worker had a gradient in the last exchange that is no fit number. It was not taken there."""
        self.residuals = [[np.zeros(n, np.float32) for n in numels] for _ in range(workers)]
        self.answer_residuals = [np.zeros(n, np.float32) for n in numels]

    def exchange(self, gradients: Sequence[Sequence[Floats | None]]) -> list[Floats]:
        """The averaged gradient of every parameter."""
        for of_worker in self.residuals:
            of_worker[:] = [residual * self.decay for residual in of_worker]
        self.answer_residuals = [residual * self.decay for residual in self.answer_residuals]
        self.unfit = False
        return [
            self._average(index, [of_worker[index] for of_worker in gradients])
            for index in range(len(self.answer_residuals))
        ]

    def _average(self, index: int, gradients: Sequence[Floats | None]) -> Floats:
        total = np.zeros_like(self.answer_residuals[index])
        for residuals, gradient in zip(self.residuals, gradients, strict=True):
            if gradient is not None:
                c = residuals[index] + gradient
                fit = np.abs(c) < TOO_LARGE
                c = np.where(fit, c, residuals[index])
                self.unfit |= not fit.all()
                _, _, values = encode(c, *self.rule)
                total = total + values
                if self.error_feedback:
                    residuals[index] = c - values
        y = total * np.float32(np.float32(1) / np.float32(len(gradients))) + self.answer_residuals[index]
        _, _, answer = encode(y, *self.rule)
        if self.error_feedback:
            self.answer_residuals[index] = y - answer
        return answer

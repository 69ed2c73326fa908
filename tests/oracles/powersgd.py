"""PowerSGD, literally: n workers in one process, one matrix after another, in NumPy with float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]


class PowerSGD:
    """One matrix: its `q`, and the residuals of all workers. Vectors have no `q` and are averaged as they are."""

    def __init__(self, workers: int, q: Matrix | None, *, error_feedback: bool = True) -> None:
        self.q = q
        self.error_feedback = error_feedback
        self.residuals: list[Matrix | float] = [0.0] * workers

    def exchange(self, gradients: Sequence[Matrix]) -> Matrix:
        """The averaged gradient."""
        if self.q is None:
            return np.mean(gradients, axis=0)
        matrices = [g + e for g, e in zip(gradients, self.residuals, strict=True)]
        p = gram_schmidt(np.mean([m @ self.q for m in matrices], axis=0))
        self.q = np.mean([m.T @ p for m in matrices], axis=0)
        average = p @ self.q.T
        if self.error_feedback:
            self.residuals = [m - average for m in matrices]
        return average


def gram_schmidt(p: Matrix) -> Matrix:
    """Orthonormal columns that span the same space."""
    columns: list[npt.NDArray[np.float64]] = []
    for column in p.T:
        for earlier in columns:
            column = column - earlier * (column @ earlier)
        columns.append(column / np.linalg.norm(column))
    return np.stack(columns, axis=1)

"""CSER (Xie et al., NeurIPS 2020), literally: n workers in one process, with the errors that the paper writes down.

    PSync(v, C):   v'_i = C(v_i),  r_i = v_i - v'_i;  returns mean(v') + r_i, and r_i
    every step:    p_i, r_i = PSync(how far the inner step moved, C2);  x_i ← x_i - p_i;  e_i ← e_i - r_i
    every H:       s_i, r_i = PSync(e_i, C1);  x_i ← x_i - e_i + s_i;  e_i ← r_i

Nothing of thinwire is imported. A mean may be compressed too; what that leaves out stays with the average.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.oracles.averaging import AveragingOracle

Arrays = list[np.ndarray]


class Cser:
    """`fragments` has for each fragment the indices of its parameters, and C1; `step_average` is C2, if any."""

    def __init__(
        self,
        params: Sequence[np.ndarray],
        workers: int,
        fragments: Sequence[tuple[Sequence[int], AveragingOracle]],
        step_average: AveragingOracle | None,
        every: int,
    ) -> None:
        self.x = [[p.astype(np.float64) for p in params] for _ in range(workers)]
        self.e = [[np.zeros_like(p, dtype=np.float64) for p in params] for _ in range(workers)]
        self.fragments, self.step_average, self.every = fragments, step_average, every
        self.step_number = 0

    def step(self, moves: Sequence[Arrays]) -> None:
        """One step, in which the optimizer of each worker moves its parameters down by `moves`."""
        every_parameter = range(len(moves[0]))
        synced, left_out = self.psync(self.step_average, moves) if self.step_average else (moves, moves)
        for x, e, p, r in zip(self.x, self.e, synced, left_out, strict=True):
            for i in every_parameter:
                x[i], e[i] = x[i] - p[i], e[i] - r[i]
        self.step_number += 1
        done = (self.step_number - 1) % self.every + 1
        for number, (indices, average) in enumerate(self.fragments):
            if done != (number + 1) * self.every // len(self.fragments):
                continue
            synced, left_out = self.psync(average, [[e[i] for i in indices] for e in self.e])
            for x, e, s, r in zip(self.x, self.e, synced, left_out, strict=True):
                for place, i in enumerate(indices):
                    x[i], e[i] = x[i] - e[i] + s[place], r[place]

    def psync(self, average: AveragingOracle, vectors: Sequence[Arrays]) -> tuple[list[Arrays], list[Arrays]]:
        average.residuals[:] = 0.0
        means = average.step([[v if v.any() else None for v in of_worker] for of_worker in vectors])
        synced, left_out = [], []
        for residual, of_worker in zip(average.residuals, vectors, strict=True):
            r = [residual[place].reshape(v.shape) for place, v in zip(average.places, of_worker, strict=True)]
            shown = [any(of_one[i].any() for of_one in vectors) for i in range(len(r))]
            synced.append([m.reshape(e.shape) * any_ + e for m, e, any_ in zip(means, r, shown, strict=True)])
            left_out.append(r)
        return synced, left_out

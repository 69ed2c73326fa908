"""Local steps with workers that come and go, literally, in NumPy: who takes part in each exchange is given.

With n workers of whom k contribute, Δ = n/k·(θ_ref - θ) for those, and 0 for newcomers. The average goes through a
quantizer with residuals e_i of workers and ē of owners; a single worker sends nothing. When the members change:

* a worker that stays keeps e_i, and adds n·ē of the elements that it owned, with the new n, unless rank and n stay;
* a newcomer has e_i = 0, and nobody has an ē.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tests.oracles.flat_space import WORD, Group, cut, lay_out
from tests.oracles.quantized_averaging import QuantizedAveraging

Arrays = list[np.ndarray]


def owners(params: Arrays, workers: int) -> Arrays:
    """For each parameter, the rank of the owner of each element, in one bucket."""
    places = lay_out([Group(params, lr=1.0)])
    words = max(-(-(place.elements[-1] + 1) // WORD) for place in places)
    shards = cut(words, workers, 1 << 30)
    return [place.elements // (WORD * shards[0].length) for place in places]


class ElasticLocalSteps:
    """`quantizer` has bits, block and spread."""

    def __init__(self, params: Arrays, quantizer: tuple[int, int, float], outer_lr: float, momentum: float) -> None:
        self.reference, self.momentum = params, [np.zeros_like(p) for p in params]
        self.quantizer, self.eta, self.mu = quantizer, np.float32(outer_lr), np.float32(momentum)
        self.members: list[int] = []
        self.residuals: dict[int, Arrays] = {}
        self.answers: dict[int, tuple[tuple[int, int], Arrays]] = {}
        """Of each worker, rank and number of workers, and ē where it is the owner, else zeros."""

    def exchange(self, members: Sequence[int], moves: Mapping[int, Sequence[Arrays]]) -> Arrays:
        """One exchange of these workers; θ_ref after it. `moves` has the inner steps of those who contribute."""
        n, k = len(members), len(moves)
        updates = []
        for worker in members:
            theta = self.reference
            for move in moves.get(worker, ()):
                theta = [p - m for p, m in zip(theta, move, strict=True)]
            update = [(r - p).reshape(-1) for r, p in zip(self.reference, theta, strict=True)]
            updates.append([np.float32(n / k) * u for u in update] if k < n else update)
        average = updates[0] if n == 1 else self._average(members, moves, updates)
        for i, update in enumerate(average):
            shaped = update.reshape(self.reference[i].shape)
            self.momentum[i] = self.mu * self.momentum[i] + shaped
            self.reference[i] = self.reference[i] - self.eta * (self.mu * self.momentum[i] + shaped)
        return [p.copy() for p in self.reference]

    def _average(self, members: Sequence[int], moves: Mapping[int, Sequence[Arrays]], updates: list[Arrays]) -> Arrays:
        n, zeros = len(members), [np.zeros(p.size, np.float32) for p in self.reference]
        exact = QuantizedAveraging(n, [p.size for p in self.reference], *self.quantizer)
        of_ranks = owners(self.reference, n)
        for rank, worker in enumerate(members):
            residual = self.residuals.get(worker, zeros)
            place, answer = self.answers.get(worker, ((rank, n), zeros))
            if place == (rank, n):
                mine = [a * (o == rank) for a, o in zip(answer, of_ranks, strict=True)]
                exact.answer_residuals = [a + b for a, b in zip(exact.answer_residuals, mine, strict=True)]
            else:
                residual = [e + np.float32(n) * a for e, a in zip(residual, answer, strict=True)]
            exact.residuals[rank] = list(residual)
        average = exact.exchange([u if w in moves else [None] * len(u) for w, u in zip(members, updates, strict=True)])
        for rank, worker in enumerate(members):
            self.residuals[worker] = exact.residuals[rank]
            kept = [a * (o == rank) for a, o in zip(exact.answer_residuals, of_ranks, strict=True)]
            self.answers[worker] = ((rank, n), kept)
        return average

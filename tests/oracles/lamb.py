"""LAMB for n workers in one process: Adam's direction, a layer at a time as long as its coefficient says."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.oracles.flat_space import (
    AdamParameter,
    Betas,
    FlatSpace,
    Gradient,
    Gradients,
    Group,
    Moves,
    Outcome,
    by_parameter,
)
from tests.oracles.mean_gradient import MeanGradient


@dataclass
class LambParameter(AdamParameter):
    """A layer. `coefficient` is c of its last update."""

    min_coeff: float
    max_coeff: float
    coefficient: float = field(init=False, default=1.0)

    def lamb(self) -> None:
        """x = x - lr c r"""
        d = self.m / (1 - self.betas[0] ** self.updates) * self.current_preconditioner()
        r = np.where(self.v > 0, d + self.group.weight_decay * self.x, 0.0)
        x_norm, r_norm = float(np.linalg.norm(self.x)), float(np.linalg.norm(r))
        ratio = x_norm / r_norm if x_norm > 0 and r_norm > 0 else 1.0
        self.coefficient = min(max(ratio, self.min_coeff), self.max_coeff)
        self.move(self.x - self.group.lr * self.coefficient * r, self.v > 0)


class LambOracle:
    """As OneBitAdamOracle. There are no signs, so shards and `compressed` make no difference.

    With `delay=1` a step moves by the mean gradient of the step before, from where parameters are now.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        workers: int,
        *,
        slices: int = 1,
        bucket_elements: int,
        compressed: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-6,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        maximize: bool = False,
        delay: int = 0,
    ) -> None:
        self.moves = Moves(delay)
        self.groups = list(groups)
        self.compressed, self.maximize = compressed, maximize
        self.space = FlatSpace(self.groups, workers, slices, bucket_elements)
        self.parameters = [
            LambParameter(*place, place.group.betas or betas, eps, min_coeff, max_coeff) for place in self.space.places
        ]
        self.mean = MeanGradient(self.space, bits=None)
        self.step_number = 0

    @property
    def values(self) -> list[np.ndarray]:
        return [p.value for p in self.parameters]

    def step(self, gradients: Gradients) -> Outcome:
        self.step_number += 1
        of_parameters = by_parameter(gradients, [p.elements.size for p in self.parameters], self.maximize)
        self.moves.of_last_step()
        return lamb_step(self.parameters, of_parameters, self.mean, self.moves)

    def synchronize(self) -> None:
        self.moves.of_last_step()

    @property
    def is_synchronized(self) -> bool:
        return not self.moves.in_flight


def lamb_step(
    parameters: Sequence[LambParameter], gradients: Sequence[Gradient], mean: MeanGradient, moves: Moves
) -> Outcome:
    means, skipped = mean.exchange(gradients)
    each = zip(parameters, gradients, means, strict=True)
    of_step = [functools.partial(_move, p, of_workers) for p, g, of_workers in each if g.anywhere]
    return Outcome("dense", [moves.take(of_step, skipped=skipped)] * len(gradients[0].present))


def _move(p: LambParameter, of_workers: np.ndarray) -> None:
    p.absorb(of_workers)
    p.lamb()

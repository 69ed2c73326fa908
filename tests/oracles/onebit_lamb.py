"""1-bit LAMB for n workers in one process: LAMB, then scaled signs of the momentum and a rebuilt second moment."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tests.oracles.flat_space import (
    Betas,
    FlatSpace,
    Gradient,
    Gradients,
    Group,
    Moves,
    Outcome,
    ScaledSigns,
    by_parameter,
    join,
    root_mean_square,
)
from tests.oracles.lamb import LambParameter, lamb_step
from tests.oracles.mean_gradient import MeanGradient
from tests.oracles.onebit_adam import WarmUp


@dataclass
class OneBitLambParameter(LambParameter):
    """A layer with what it needs after the freeze.

    `c_avg` is as it accumulates before the freeze, and divided by 1 - 0.9^k from then on; `layer_scale` is the page's
    k_l, `h` what it says, and `factor` f.
    """

    c_avg: float = field(init=False, default=0.0)
    w: np.ndarray = field(init=False)
    h: np.ndarray = field(init=False)
    layer_scale: float = field(init=False, default=1.0)
    factor: float = field(init=False, default=1.0)

    def freeze(self, floor: float) -> None:
        self.P = self.current_preconditioner(floor)
        if self.updates > 0:
            self.w = self.v / (1 - self.betas[1] ** self.updates)
            self.c_avg /= 1 - 0.9**self.updates
        else:
            self.w = np.zeros_like(self.v)

    @property
    def momentum_size(self) -> float:
        """q_l = max(||m_l||, 0.1 sqrt(sum v/(1 - beta2^k))) / sqrt(d_l)"""
        if not self.updates:
            return 0.0
        corrected = self.v / (1 - self.betas[1] ** self.updates)
        return max(root_mean_square(self.m), 0.1 * root_mean_square(np.sqrt(corrected)))

    def rebuild(self, m_before: np.ndarray) -> None:
        """g' = (m - beta1 m_before)/(1 - beta1), w = beta2 w + (1 - beta2) g'^2"""
        beta1, beta2 = self.betas
        g = (self.m - beta1 * m_before) / (1 - beta1)
        self.w = beta2 * self.w + (1 - beta2) * g**2

    def onebit_lamb(self) -> None:
        """x = x - lr c_avg f r, where P > 0"""
        live = self.P > 0
        if not live.any():
            return
        decay = self.group.weight_decay
        d = self.m / (1 - self.betas[0] ** self.updates) * self.P
        r = np.where(live, d + decay * self.x, 0.0)
        f = float(np.max(1 / (self.P[live] * (np.sqrt(self.w[live]) + self.eps))))
        if decay > 0:
            d_norm, r_norm = float(np.linalg.norm(d)), float(np.linalg.norm(r))
            p = min(1.0, d_norm / r_norm) if r_norm > 0 else 1.0
            f = f * p + (1 - p)
        f = min(max(f, 0.5), 4.0)
        self.factor = min(max(f, 0.9 * self.factor), 1.1 * self.factor)
        self.move(self.x - self.group.lr * self.c_avg * self.factor * r, live)


class OneBitLambOracle:
    """As OneBitAdamOracle. With `delay=1`, ||x|| and f are those of the step that moves."""

    def __init__(
        self,
        groups: Sequence[Group],
        workers: int,
        *,
        slices: int = 1,
        bucket_elements: int,
        compressed: bool = True,
        warmup_steps: int | Literal["auto"],
        warmup_bits: int | None = None,
        scale_block: int | None = None,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-6,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        variance_floor: float = 0.1,
        maximize: bool = False,
        delay: int = 0,
    ) -> None:
        self.moves = Moves(delay)
        self.variance_floor = variance_floor
        self.groups = list(groups)
        self.compressed, self.maximize = compressed, maximize
        self.space = FlatSpace(self.groups, workers, slices, bucket_elements, scale_block)
        self.parameters = [
            OneBitLambParameter(*place, place.group.betas or betas, eps, min_coeff, max_coeff)
            for place in self.space.places
        ]
        self.mean = MeanGradient(self.space, warmup_bits)
        self.signs = ScaledSigns(self.space)
        self.warm_up = WarmUp(warmup_steps, self.groups, max(p.betas[1] for p in self.parameters))
        self.step_number = 0
        self.frozen = False
        self.answers_heard = 0

    @property
    def values(self) -> list[np.ndarray]:
        return [p.value for p in self.parameters]

    def step(self, gradients: Gradients) -> Outcome:
        self.step_number += 1
        of_parameters = by_parameter(gradients, [p.elements.size for p in self.parameters], self.maximize)
        if self.frozen:
            return self._compressed_step(of_parameters)
        outcome = self._dense_step(of_parameters)
        sum_of_v = sum(float(p.v.sum()) for p in self.parameters)
        if self.warm_up.ends_with(self.step_number, sum_of_v) and self.compressed:
            self._freeze()
        return outcome

    def _dense_step(self, gradients: Sequence[Gradient]) -> Outcome:
        outcome = lamb_step(self.parameters, gradients, self.mean, Moves(0))
        for p, g in zip(self.parameters, gradients, strict=True):
            if g.anywhere and not outcome.skipped:
                p.c_avg = 0.9 * p.c_avg + 0.1 * p.coefficient
        return outcome

    def _freeze(self) -> None:
        sizes = [p.momentum_size for p in self.parameters if p.momentum_size > 0]
        for p in self.parameters:
            p.freeze(self.variance_floor)
            if p.momentum_size > 0:
                p.layer_scale = min(max(float(np.mean(sizes)) / p.momentum_size, 1e-3), 1e3)
            p.h = p.layer_scale * p.m
        self.frozen = True

    def _compressed_step(self, gradients: Sequence[Gradient]) -> Outcome:
        self.moves.of_last_step()
        both = list(zip(self.parameters, gradients, strict=True))
        inputs = join([p.betas[0] * p.h + (1 - p.betas[0]) * p.layer_scale * g.of_workers for p, g in both])
        c, unfit = self.signs.add(inputs, join([p.betas[0] * p.h for p in self.parameters]))
        skipped = any(unfit)
        moves = []
        for (p, g), answer in zip(both, self.space.split(self.signs.exchange(c)), strict=True):
            m_before = p.m if self.answers_heard > 0 else None
            p.h, p.m = answer, answer / p.layer_scale
            if g.anywhere:
                moves.append(functools.partial(_move, p, m_before))
        self.answers_heard += 1
        stayed = self.moves.take(moves, skipped=skipped)
        return Outcome("signs", [stayed] * self.space.workers)

    def synchronize(self) -> None:
        self.moves.of_last_step()

    @property
    def is_synchronized(self) -> bool:
        return not self.moves.in_flight


def _move(p: OneBitLambParameter, m_before: np.ndarray | None) -> None:
    p.updates += 1
    if m_before is not None:
        p.rebuild(m_before)
    p.onebit_lamb()

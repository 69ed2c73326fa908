"""1-bit Adam for n workers in one process: AdamW, then a frozen preconditioner and scaled signs of the momentum."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal

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
    ScaledSigns,
    by_parameter,
    join,
)
from tests.oracles.mean_gradient import MeanGradient

STEADY = 0.96
CHECKS_A_WINDOW = 16


class WarmUp:
    """When it ends: after a number of steps, or by itself once `v` has stopped growing."""

    def __init__(self, steps: int | Literal["auto"], groups: Sequence[Group], beta2: float) -> None:
        self.steps, self.groups = steps, groups
        self.beta2 = beta2
        self.window = round(1 / (1 - beta2))
        self.interval = math.ceil(self.window / CHECKS_A_WINDOW)
        self.last_rise = -math.inf
        self.sums: dict[int, float] = {}
        self.lrs_before = [group.lr for group in groups]

    def ends_with(self, step: int, sum_of_v: float) -> bool:
        """To be asked once at the end of every step."""
        lrs = [group.lr for group in self.groups]
        if any(now > before for now, before in zip(lrs, self.lrs_before, strict=True)) and step > 1:
            self.last_rise = step
        rising = step - self.last_rise < self.window
        self.lrs_before = lrs
        corrected = self.sums[step] = sum_of_v / (1 - self.beta2**step)
        if self.steps != "auto":
            return step == self.steps
        earlier = self.sums.get(step - CHECKS_A_WINDOW * self.interval, 0.0)
        return step % self.interval == 0 and earlier > 0 and corrected >= STEADY * earlier and not rising


class OneBitAdamOracle:
    """`groups` hold the starting values; `step` takes gradients as ``[worker][parameter]``, None where absent.

    In a hierarchical topology a worker is a node of `slices` ranks, and its gradient the mean of theirs.
    `compressed=False` is a single node: its warm-up never ends. While it lasts `frozen` is False. With `delay=1` the
    answers after the warm-up move the parameters one step later, at the rate of that step.
    """

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
        eps: float = 1e-8,
        variance_floor: float = 0.1,
        maximize: bool = False,
        delay: int = 0,
    ) -> None:
        self.moves = Moves(delay)
        self.variance_floor = variance_floor
        self.groups = list(groups)
        self.compressed, self.maximize = compressed, maximize
        self.space = FlatSpace(self.groups, workers, slices, bucket_elements, scale_block)
        self.parameters = [AdamParameter(*place, place.group.betas or betas, eps) for place in self.space.places]
        self.mean = MeanGradient(self.space, warmup_bits)
        self.signs = ScaledSigns(self.space)
        self.warm_up = WarmUp(warmup_steps, self.groups, max(p.betas[1] for p in self.parameters))
        self.step_number = 0
        self.frozen = False

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
        means, skipped = self.mean.exchange(gradients)
        for p, g, mean in zip(self.parameters, gradients, means, strict=True):
            if g.anywhere and not skipped:
                p.absorb(mean)
                p.adamw(p.current_preconditioner())
        return Outcome("dense", [skipped] * self.space.workers)

    def _freeze(self) -> None:
        for p in self.parameters:
            p.P = p.current_preconditioner(self.variance_floor)
        self.frozen = True

    def _compressed_step(self, gradients: Sequence[Gradient]) -> Outcome:
        self.moves.of_last_step()  # by the last answer, which is the momentum
        both = list(zip(self.parameters, gradients, strict=True))
        inputs = join([p.betas[0] * p.m + (1 - p.betas[0]) * g.of_workers for p, g in both])
        c, unfit = self.signs.add(inputs, join([p.betas[0] * p.m for p in self.parameters]))
        skipped = any(unfit)
        for p, answer in zip(self.parameters, self.space.split(self.signs.exchange(c)), strict=True):
            p.m = answer
        stayed = self.moves.take([functools.partial(_move, p) for p, g in both if g.anywhere], skipped=skipped)
        return Outcome("signs", [stayed] * self.space.workers)

    def synchronize(self) -> None:
        self.moves.of_last_step()

    @property
    def is_synchronized(self) -> bool:
        return not self.moves.in_flight


def _move(p: AdamParameter) -> None:
    p.updates += 1
    p.adamw(p.P)

"""0/1 Adam for n workers in one process: ever fewer variance steps, then local steps with ever fewer synchronisations.

What workers may have their own of after the freeze has them in its first axis from the beginning: `value` and `m`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.oracles.flat_space import (
    TOO_LARGE,
    AdamParameter,
    Betas,
    FlatSpace,
    Gradient,
    Gradients,
    Group,
    Outcome,
    ScaledSigns,
    by_parameter,
    join,
    preconditioner_of,
    root_mean_square,
)
from tests.oracles.mean_gradient import MeanGradient


def variance_steps(scaler: int, last: int) -> list[int]:
    """1, 2, ..., scaler, then every second step `scaler` times, every fourth, and so on, none of them after `last`."""
    steps: list[int] = []
    step, interval = 0, 1
    while True:
        for _ in range(scaler):
            step += interval
            if step > last:
                return steps
            steps.append(step)
        interval *= 2


def local_interval(steps_since_freeze: int, scaler: int, clipper: int) -> int:
    return min(2 ** ((steps_since_freeze - 1) // scaler), clipper)


@dataclass
class ZeroOneParameter(AdamParameter):
    """`variance_updates` is the page's j. The lower half is about the time since the last synchronisation."""

    workers: int
    variance_updates: int = field(init=False, default=0)

    c: np.ndarray = field(init=False)
    x_then: np.ndarray = field(init=False)
    lr_sum: float = field(init=False, default=0.0)
    lr_sum_before: float = field(init=False, default=0.0)
    decay_product: float = field(init=False, default=1.0)
    had_gradient: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.value = np.stack([self.value] * self.workers)
        self.m = np.zeros((self.workers, self.elements.size))

    @property
    def x(self) -> np.ndarray:
        return self.value.reshape(self.workers, self.elements.size)

    def current_preconditioner(self, floor: float = 0.0) -> np.ndarray:
        return preconditioner_of(self.v, self.variance_updates, self.betas[1], self.eps, floor)

    def eps_of_signs(self, floor: float) -> float:
        """Before the freeze, once there are signs in m, it is eps that is at least floor rms(V)."""
        if not self.variance_updates:
            return self.eps
        rms = root_mean_square(np.sqrt(self.v[self.v > 0] / (1 - self.betas[1] ** self.variance_updates)))
        return max(self.eps, floor * rms)

    def begin_interval(self, worker_errors: np.ndarray) -> None:
        self.c = worker_errors.copy()
        self.x_then = self.x[0].copy()
        self.lr_sum_before = self.lr_sum or self.lr_sum_before
        self.lr_sum, self.decay_product, self.had_gradient = 0.0, 1.0, False


class ZeroOneAdamOracle:
    """As OneBitAdamOracle; `replicas` is what every worker has, ``[worker][parameter]``.

    `compressed=False` is a single node: each of its steps is a variance step.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        workers: int,
        *,
        slices: int = 1,
        bucket_elements: int,
        compressed: bool = True,
        var_freeze_step: int,
        var_update_scaler: int = 16,
        warmup_bits: int | None = None,
        scale_block: int | None = None,
        local_step_scaler: int,
        local_step_clipper: int = 16,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        variance_floor: float = 0.1,
        maximize: bool = False,
    ) -> None:
        self.variance_floor = variance_floor
        self.groups = list(groups)
        self.compressed, self.maximize = compressed, maximize
        self.var_freeze_step = var_freeze_step
        self.variance_steps = set(variance_steps(var_update_scaler, var_freeze_step))
        self.local_step_scaler, self.local_step_clipper = local_step_scaler, local_step_clipper
        self.space = FlatSpace(self.groups, workers, slices, bucket_elements, scale_block)
        self.parameters = [
            ZeroOneParameter(*place, place.group.betas or betas, eps, workers) for place in self.space.places
        ]
        self.mean = MeanGradient(self.space, warmup_bits)
        self.signs = ScaledSigns(self.space)
        self.step_number = 0
        self.local_steps = 0
        self.frozen = False

    @property
    def replicas(self) -> list[list[np.ndarray]]:
        return [[p.value[worker] for p in self.parameters] for worker in range(self.space.workers)]

    @property
    def is_synchronized(self) -> bool:
        return self.local_steps == 0

    @property
    def values(self) -> list[np.ndarray]:
        """What all workers have; only while they do."""
        assert self.is_synchronized
        return self.replicas[0]

    def step(self, gradients: Gradients) -> Outcome:
        self.step_number += 1
        of_parameters = by_parameter(gradients, [p.elements.size for p in self.parameters], self.maximize)
        if self.frozen:
            return self._step_after_the_freeze(of_parameters)
        if not self.compressed or self.step_number in self.variance_steps:
            outcome = self._variance_step(of_parameters)
        else:
            outcome = self._momentum_step(of_parameters)
        if self.compressed and self.step_number == self.var_freeze_step:
            self._freeze()
        return outcome

    def synchronize(self) -> None:
        if not self.is_synchronized:
            self._exchange(skipped=False)

    def _variance_step(self, gradients: Sequence[Gradient]) -> Outcome:
        means, skipped = self.mean.exchange(gradients)
        for p, g, mean in zip(self.parameters, gradients, means, strict=True):
            if g.anywhere and not skipped:
                eps = p.eps_of_signs(self.variance_floor) if p.updates > p.variance_updates else p.eps
                p.absorb(mean)
                p.variance_updates += 1
                p.adamw(preconditioner_of(p.v, p.variance_updates, p.betas[1], eps))
        return Outcome("dense", [skipped] * self.space.workers)

    def _momentum_step(self, gradients: Sequence[Gradient]) -> Outcome:
        """Scaled signs of the gradient: `m` is updated, `v` is not."""
        inputs = join([g.of_workers for g in gradients])
        c, unfit = self.signs.add(inputs, np.zeros_like(inputs))
        skipped = any(unfit)
        answers = self.space.split(self.signs.exchange(c))
        for p, g, answer in zip(self.parameters, gradients, answers, strict=True):
            if g.anywhere and not skipped:
                p.m = p.betas[0] * p.m + (1 - p.betas[0]) * answer
                p.updates += 1
                eps = p.eps_of_signs(self.variance_floor)
                p.adamw(preconditioner_of(p.v, p.variance_updates, p.betas[1], eps))
        return Outcome("signs", [skipped] * self.space.workers)

    def _freeze(self) -> None:
        for p in self.parameters:
            p.P = p.current_preconditioner(self.variance_floor)
        self.signs.forget()
        self._begin_interval()
        self.frozen = True

    def _begin_interval(self) -> None:
        for p, errors in zip(self.parameters, self.space.split(self.signs.worker_errors), strict=True):
            p.begin_interval(errors)
        self.local_steps = 0

    def _step_after_the_freeze(self, gradients: Sequence[Gradient]) -> Outcome:
        since_freeze = self.step_number - self.var_freeze_step
        interval = local_interval(since_freeze, self.local_step_scaler, self.local_step_clipper)
        self._fade_errors(interval - (since_freeze - 1) % interval)
        unfit = self._absorb(gradients)
        if since_freeze % interval == 0:
            # Local steps must not be lost: only an interval of this one step can be skipped.
            skipped = any(unfit) and self.is_synchronized
            self._exchange(skipped)
            return Outcome("signs", [skipped] * self.space.workers)
        self._move_locally(gradients, unfit)
        self.local_steps += 1
        return Outcome("none", unfit)

    def _fade_errors(self, steps_to_go: int) -> None:
        """In the first step of an interval whose learning rates are going to be less than 0.99 of the last one's."""
        factors = []
        for p in self.parameters:
            factor = 1.0
            if p.lr_sum == 0 and p.lr_sum_before > 0:
                shrink = min(1.0, self._rate(p) * steps_to_go / p.lr_sum_before)
                factor = shrink if shrink < 0.99 else 1.0
            p.c *= factor
            factors.append(np.full(p.elements.size, factor))
        self.signs.fade_owner_errors(np.concatenate(factors))

    def _absorb(self, gradients: Sequence[Gradient]) -> list[bool]:
        """m = beta1 m + (1 - beta1) g, c = c + a m, worker by worker; returns who had a number that is not fit."""
        unfit = [False] * self.space.workers
        for p, g in zip(self.parameters, gradients, strict=True):
            beta1, a = p.betas[0], self._rate(p)
            for worker in np.flatnonzero(g.present):
                finite = np.isfinite(g.of_workers[worker])
                m = beta1 * p.m[worker] + (1 - beta1) * np.where(finite, g.of_workers[worker], 0.0)
                fit = finite & (np.abs(p.c[worker] + a * m) < TOO_LARGE)
                p.m[worker] = np.where(fit, m, p.m[worker])
                p.c[worker] += a * p.m[worker]
                unfit[worker] |= not fit.all()
            p.lr_sum += a
            p.decay_product *= 1 - p.group.lr * p.group.weight_decay
            p.had_gradient |= g.anywhere
        return unfit

    def _rate(self, p: ZeroOneParameter) -> float:
        """a = lr/(1 - beta1^t)"""
        return p.group.lr / (1 - p.betas[0] ** self.step_number)

    def _move_locally(self, gradients: Sequence[Gradient], unfit: Sequence[bool]) -> None:
        """x = (1 - lr wd) x - a m P"""
        for p, g in zip(self.parameters, gradients, strict=True):
            moving = (g.present & ~np.array(unfit))[:, None] & (p.P > 0)
            p.move((1 - p.group.lr * p.group.weight_decay) * p.x - self._rate(p) * p.m * p.P, moving)

    def _exchange(self, skipped: bool) -> None:
        """m = u / A, x = (product of (1 - lr wd)) x_then - u P"""
        answers = self.space.split(self.signs.exchange(join([p.c for p in self.parameters])))
        for p, u in zip(self.parameters, answers, strict=True):
            taken = p.had_gradient and p.lr_sum > 0 and not skipped
            if taken:
                p.m[:] = u / p.lr_sum
            moving = (p.P > 0) & taken
            x = np.where(moving, p.decay_product * p.x_then - u * p.P, p.x_then)
            p.value = np.stack([x] * p.workers).reshape(p.value.shape)
        self._begin_interval()

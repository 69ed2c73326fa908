"""CD-Adam for n workers in one process: AMSGrad on what all know of the gradient, of which changes are exchanged."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tests.oracles.flat_space import (
    TOO_LARGE,
    WORD,
    AdamParameter,
    Betas,
    FlatSpace,
    Gradient,
    Gradients,
    Group,
    Moves,
    Outcome,
    by_parameter,
    join,
    preconditioner_of,
    sign,
)


@dataclass
class AMSGradParameter(AdamParameter):
    """`peak` is the largest `v` so far."""

    peak: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peak = np.zeros(self.elements.size)

    def amsgrad(self, g: np.ndarray) -> None:
        """x = (1 - lr wd) x - lr/(1 - beta1^k) m / (sqrt(peak/(1 - beta2^k)) + eps), where peak > 0"""
        self.absorb(g)
        self.peak = np.maximum(self.peak, self.v)
        self.adamw(preconditioner_of(self.peak, self.updates, self.betas[1], self.eps))


class CDAdamOracle:
    """As OneBitAdamOracle. What follows is joined, `known`, `momenta` and `contraction` with a row for each worker.

    `known` is what worker i has said of its gradient (ĝ_i), `mean` what the owners make of it (ĝ), and `g` what they
    have told everybody (g̃). Where `alive` is False nothing of that happens. `momenta` stay 0 with compress="gradient".
    `contraction` has an entry for each step: ||c - C(c)||^2 / ||c||^2, the share of what was to be said that was not;
    0 where nothing was to be said, in a greeting without a step for one. With `delay=1` nothing of that changes, and x,
    m, v and `peak` follow `g` one step later.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        workers: int,
        *,
        slices: int = 1,
        bucket_elements: int,
        compressed: bool = True,
        codec: Literal["sign", "topk"] = "sign",
        ratio: float = 1 / 64,
        compress: Literal["gradient", "momentum"] = "gradient",
        betas: Betas | None = None,
        eps: float = 1e-8,
        maximize: bool = False,
        delay: int = 0,
    ) -> None:
        self.moves = Moves(delay)
        self.groups = list(groups)
        self.compressed, self.maximize = compressed, maximize
        self.codec, self.ratio, self.compress = codec, ratio, compress
        betas = betas or ((0.0, 0.99) if (codec, compress) == ("sign", "gradient") else (0.9, 0.99))
        self.space = FlatSpace(self.groups, workers, slices, bucket_elements)
        self.parameters = [AMSGradParameter(*place, place.group.betas or betas, eps) for place in self.space.places]
        elements = self.space.elements.size
        self.known, self.momenta = np.zeros((workers, elements)), np.zeros((workers, elements))
        self.mean, self.g = np.zeros(elements), np.zeros(elements)
        # Top-k says nothing of a coordinate that has nothing to say, so it needs no map: all may speak.
        self.alive = np.full(elements, codec == "topk")
        self.contraction: list[np.ndarray] = []
        self.step_number = 0

    @property
    def values(self) -> list[np.ndarray]:
        return [p.value for p in self.parameters]

    def step(self, gradients: Gradients) -> Outcome:
        self.step_number += 1
        self.moves.of_last_step()
        self.contraction.append(np.zeros(self.space.workers))
        of_parameters = by_parameter(gradients, [p.elements.size for p in self.parameters], self.maximize)
        if not self.compressed:
            return self._dense_step(of_parameters)
        wishes, skipped = self._wishes(of_parameters)
        greeting = self.codec == "sign" and self.step_number == 1
        if greeting:
            self._hear_hellos(wishes)
        if not (greeting and skipped):
            self._exchange(wishes)
        stayed = self.moves.take(self._moves(of_parameters), skipped=skipped, known_at_once=greeting)
        return Outcome("signs" if self.codec == "sign" else "topk", [stayed] * self.space.workers)

    def synchronize(self) -> None:
        self.moves.of_last_step()

    @property
    def is_synchronized(self) -> bool:
        return not self.moves.in_flight

    def _dense_step(self, gradients: Sequence[Gradient]) -> Outcome:
        skipped = not all(g.finite for g in gradients)
        if not skipped:
            self.g = join([g.mean for g in gradients])
        stayed = self.moves.take(self._moves(gradients), skipped=skipped)
        return Outcome("dense", [stayed] * self.space.workers)

    def _moves(self, gradients: Sequence[Gradient]) -> list[Callable[[], None]]:
        known_to_all = self.space.split(self.g)
        each = zip(self.parameters, gradients, known_to_all, strict=True)
        return [functools.partial(p.amsgrad, of_p) for p, g, of_p in each if g.anywhere]

    def _wishes(self, gradients: Sequence[Gradient]) -> tuple[np.ndarray, bool]:
        """What each worker wants to say, or has said where that is no fit number; and whether there was one."""
        given = self.space.spread([g.present for g in gradients])
        wishes = join([g.of_workers for g in gradients])
        bad = np.zeros_like(given)
        if self.compress == "momentum":
            beta1 = self.space.spread([p.betas[0] for p in self.parameters])
            momenta = np.where(given, beta1 * self.momenta + (1 - beta1) * wishes, self.momenta)
            bad = ~(np.abs(momenta) < TOO_LARGE)
            wishes = self.momenta = np.where(bad, self.momenta, momenta)
        unspeakable = ~(np.abs(wishes - self.known) < TOO_LARGE)
        return np.where(unspeakable, self.known, wishes), bool(np.any(given & (bad | unspeakable)))

    def _hear_hellos(self, wishes: np.ndarray) -> None:
        self.alive = self.alive | np.any(wishes != 0, axis=0)

    def _exchange(self, wishes: np.ndarray) -> None:
        c = np.where(self.alive, wishes - self.known, 0.0)
        q = np.stack([self._say(of_worker, self.alive) for of_worker in c])
        self.contraction[-1] = share(c - q, c)
        loud = self.alive & ~self._quiet(wishes)
        self.known = np.where(loud, self.known + q, 0.0)
        self.mean = np.where(loud, self.mean + q.mean(axis=0), 0.0)
        g = np.where(loud, self.g, 0.0)
        self.g = g + self._say(np.where(loud, self.mean - g, 0.0), loud)
        self._hear_hellos(wishes)

    def _quiet(self, wishes: np.ndarray) -> np.ndarray:
        """Elements of words of which no worker has anything but zeros to say, which all are told."""
        words = self.space.elements // WORD
        busy = np.bincount(words, weights=np.any(wishes != 0, axis=0)) > 0
        return ~busy[words] if self.codec == "sign" else np.zeros(words.size, dtype=bool)

    def _say(self, c: np.ndarray, speaking: np.ndarray) -> np.ndarray:
        return self._scaled_sign(c, speaking) if self.codec == "sign" else self._largest(c)

    def _scaled_sign(self, c: np.ndarray, speaking: np.ndarray) -> np.ndarray:
        """s sign(c) of those who speak, s = ||c||_1 / (their number in the shard)."""
        sums = np.bincount(self.space.shard_of, weights=np.abs(c), minlength=self.space.shards)
        number = np.bincount(self.space.shard_of, weights=speaking, minlength=self.space.shards)
        scales = (sums / np.maximum(number, 1)).astype(np.float32).astype(np.float64)
        return np.where(speaking, scales[self.space.shard_of] * sign(c), 0.0)

    def _largest(self, c: np.ndarray) -> np.ndarray:
        """A share of each shard's elements; padding counts in how many those are, and is 0 itself."""
        q = np.zeros_like(c)
        for shard, length in enumerate(self.space.shard_lengths):
            inside = np.flatnonzero(self.space.shard_of == shard)
            best_first = np.lexsort((self.space.elements[inside], -np.abs(c[inside])))
            chosen = inside[best_first[: math.ceil(self.ratio * length)]]
            q[chosen] = c[chosen]
        return q


def share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Of the square of the norm, a row each; 0 of nothing."""
    squares = np.sum(whole**2, axis=-1)
    return np.divide(np.sum(part**2, axis=-1), squares, out=np.zeros_like(squares), where=squares > 0)

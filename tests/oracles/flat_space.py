"""What the oracles share: the flat space and its shards, scaled signs with error memory, and Adam's moments.

Written from docs/protocol.md alone; nothing of thinwire is imported. Arrays are float64; scales are rounded to float32,
as they travel. A *joined* array has all parameters' elements one after another in the optimizer's order, and no
padding; where workers differ they are the first axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

WORD = 64
TOO_LARGE = 2.0**60

Betas = tuple[float, float]
Gradients = Sequence[Sequence[np.ndarray | None]]
"""``[worker][parameter]``, None where a worker has no gradient."""


@dataclass
class Group:
    """A parameter group. `lr` and `weight_decay` may be changed between steps, as a scheduler does.

    `betas` are those of the optimizer unless given, and nothing to an optimizer that has but one.
    """

    parameters: list[np.ndarray]
    lr: float
    weight_decay: float = 0.0
    betas: Betas | None = None


@dataclass(frozen=True)
class Outcome:
    """What happened in a step.

    `exchange` is "dense", "signs", "topk", "sketch" or, for a local step, "none". `skipped` says that a gradient was
    not finite and parameters stayed where they were because of it, and `stayed` on which workers; they differ in
    local steps only.
    """

    exchange: str
    stayed: list[bool]

    @property
    def skipped(self) -> bool:
        return any(self.stayed)


class Moves:
    """What answers do to parameters: at once, or with `delay=1` in the next step, at the learning rate of that step.

    A delayed step moves first, before it exchanges anything. `in_flight` says that an answer has moved nothing yet.
    """

    def __init__(self, delay: int) -> None:
        self._delay = delay
        self._waiting: list[Callable[[], None]] = []
        self._skipped = False
        self.in_flight = False

    def of_last_step(self) -> None:
        """What the last answer does, if it has to wait."""
        for move in self._waiting:
            move()
        self._waiting, self.in_flight = [], False

    def take(self, moves: list[Callable[[], None]], *, skipped: bool, known_at_once: bool = False) -> bool:
        """What the answer of this step does unless it is `skipped`; whether this step moves nothing for such a reason.

        With `known_at_once` the exchange has to end in this step, so that all know already that there is no answer.
        """
        if skipped:
            moves = []
        if not self._delay:
            for move in moves:
                move()
            return skipped
        stayed, self._skipped = self._skipped, skipped
        self._waiting, self.in_flight = moves, not (skipped and known_at_once)
        return stayed


# The flat space ------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A parameter's starting value, and the numbers of its elements in the flat space."""

    value: np.ndarray
    group: Group
    elements: np.ndarray


def lay_out(groups: Sequence[Group]) -> list[Place]:
    """In the order of the groups; they lie in the reverse order, each from a multiple of 64 elements on."""
    in_group_order = [(value, group) for group in groups for value in group.parameters]
    start = 0
    places = []
    for value, group in reversed(in_group_order):
        places.append(Place(value.astype(np.float64), group, np.arange(start, start + value.size)))
        start += -(-value.size // WORD) * WORD
    return places[::-1]


class Shard(NamedTuple):
    """In words, and padding counts."""

    first: int
    length: int


def cut(words: int, shards: int, bucket_elements: int) -> list[Shard]:
    """All shards, bucket after bucket; a bucket has `shards` of them, of equal length."""
    shard_words = max(1, -(-bucket_elements // (WORD * shards)))
    result = []
    bucket = 0
    while bucket < words:
        length = min(shard_words, -(-(words - bucket) // shards))
        result += [Shard(bucket + shard * length, length) for shard in range(shards)]
        bucket += shards * length
    return result


def first_words(words: int, shards: int, bucket_elements: int) -> list[int]:
    """The first word of every shard."""
    return [shard.first for shard in cut(words, shards, bucket_elements)]


class FlatSpace:
    """Where elements lie. `elements` and `shard_of` are joined: the number of each element in the flat space, and that
    of its shard, counted through all buckets. `shard_lengths` are in elements, and count padding. `scale_of` is the
    number of the scale of each element, of which there are `scales`: one a shard, or one a block of `scale_block`;
    `block_of` counts the blocks of a shard.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        workers: int,
        slices: int,
        bucket_elements: int,
        scale_block: int | None = None,
    ) -> None:
        self.workers = workers
        self.places = lay_out(groups)
        self._ends = np.cumsum([place.value.size for place in self.places])[:-1]
        words = sum(-(-place.value.size // WORD) for place in self.places)
        shards = cut(words, workers * slices, bucket_elements)
        self.elements = np.concatenate([place.elements for place in self.places])
        self.shards = len(shards)
        self.shard_of = np.searchsorted([shard.first for shard in shards], self.elements // WORD, side="right") - 1
        self.shard_lengths = [shard.length * WORD for shard in shards]
        in_shard = self.elements - np.array([shard.first * WORD for shard in shards])[self.shard_of]
        longest = max(self.shard_lengths, default=1)
        block = longest if scale_block is None else scale_block
        self.block_of = in_shard // block
        per_shard = -(-longest // block)
        self.scale_of = self.shard_of * per_shard + self.block_of
        self.scales = self.shards * per_shard

    def split(self, joined: np.ndarray) -> list[np.ndarray]:
        """A parameter each, along the last axis."""
        return np.split(joined, self._ends, axis=-1)

    def spread(self, of_parameters: Sequence[Any]) -> np.ndarray:
        """Joined: each parameter's number (or one a worker) at all of its elements."""
        sizes = [place.value.size for place in self.places]
        return np.repeat(np.stack(of_parameters, axis=-1), sizes, axis=-1)


def join(of_parameters: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(of_parameters, axis=-1)


# Gradients -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gradient:
    """One parameter's on all workers (first axis): zeros where a worker has none."""

    of_workers: np.ndarray
    present: np.ndarray

    @property
    def anywhere(self) -> bool:
        return bool(self.present.any())

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.of_workers).all())

    @property
    def mean(self) -> np.ndarray:
        """A dense exchange."""
        return self.of_workers.mean(axis=0)


def by_parameter(gradients: Gradients, sizes: Sequence[int], maximize: bool) -> list[Gradient]:
    result = []
    for size, of_workers in zip(sizes, zip(*gradients, strict=True), strict=True):
        present = np.array([g is not None for g in of_workers])
        flat = np.stack([np.zeros(size) if g is None else g.reshape(-1).astype(np.float64) for g in of_workers])
        result.append(Gradient(-flat if maximize else flat, present))
    return result


# Scaled signs with error memory --------------------------------------------------------------------------------------


def sign(c: np.ndarray) -> np.ndarray:
    return np.where(c >= 0, 1.0, -1.0)


@dataclass
class ScaledSigns:
    """An exchange with the memories of its workers and owners, joined. All of them are 0 in the beginning."""

    space: FlatSpace
    c: np.ndarray = field(init=False)
    worker_scales: np.ndarray = field(init=False)
    y: np.ndarray = field(init=False)
    owner_scales: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        workers, elements, scales = self.space.workers, self.space.scale_of.size, self.space.scales
        self.c, self.worker_scales = np.zeros((workers, elements)), np.zeros((workers, scales))
        self.y, self.owner_scales = np.zeros(elements), np.zeros(scales)

    @property
    def worker_errors(self) -> np.ndarray:
        """e = c - s sign(c)"""
        return self.c - self._say(self.c, self.worker_scales)

    @property
    def owner_errors(self) -> np.ndarray:
        return self.y - self._say(self.y, self.owner_scales)

    def exchange(self, c: np.ndarray) -> np.ndarray:
        """Every worker sends its `c`; returns the owners' answers."""
        owner_errors = self.owner_errors
        self.c, self.worker_scales = c, np.stack([self._scales(of_worker) for of_worker in c])
        self.y = self._say(self.c, self.worker_scales).mean(axis=0) + owner_errors
        self.owner_scales = self._scales(self.y)
        return self._say(self.y, self.owner_scales)

    def fade_owner_errors(self, factors: np.ndarray) -> None:
        """Multiply them by a factor for each element."""
        self.y, self.owner_scales = self.owner_errors * factors, np.zeros_like(self.owner_scales)

    def add(self, inputs: np.ndarray, without_gradient: np.ndarray) -> tuple[np.ndarray, list[bool]]:
        """c = e + input, or with the gradient as zero where that is no fit number; and which workers had one."""
        errors = self.worker_errors
        fit = np.abs(errors + inputs) < TOO_LARGE
        return errors + np.where(fit, inputs, without_gradient), [not of_worker.all() for of_worker in fit]

    def _scales(self, c: np.ndarray) -> np.ndarray:
        """s = ||c||_2 / sqrt(len), a shard or block each; 0 for one of nothing but padding."""
        squares = np.bincount(self.space.scale_of, weights=c * c, minlength=self.space.scales)
        lengths = np.bincount(self.space.scale_of, minlength=self.space.scales)
        return np.sqrt(squares / np.maximum(lengths, 1)).astype(np.float32).astype(np.float64)

    def _say(self, c: np.ndarray, scales: np.ndarray) -> np.ndarray:
        return scales[..., self.space.scale_of] * sign(c)


# Adam's moments ------------------------------------------------------------------------------------------------------


def preconditioner_of(v: np.ndarray, updates: int, beta2: float, eps: float, floor: float = 0.0) -> np.ndarray:
    """P = 1/(max(V, floor rms(V)) + eps) with V = sqrt(v/(1 - beta2^k)), and 0 where v = 0."""
    live = v > 0
    result = np.zeros_like(v)
    roots = np.sqrt(v[live] / (1 - beta2**updates))
    result[live] = 1 / (np.maximum(roots, floor * root_mean_square(roots)) + eps)
    return result


def root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0


@dataclass
class AdamParameter:
    """A parameter with what Adam keeps for it. `updates` is the page's k; `P` is 0 until it is frozen."""

    value: np.ndarray
    group: Group
    elements: np.ndarray
    betas: Betas
    eps: float
    m: np.ndarray = field(init=False)
    v: np.ndarray = field(init=False)
    P: np.ndarray = field(init=False)
    updates: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        size = self.elements.size
        self.m, self.v, self.P = np.zeros(size), np.zeros(size), np.zeros(size)

    @property
    def x(self) -> np.ndarray:
        return self.value.reshape(-1)

    def move(self, x: np.ndarray, where: np.ndarray) -> None:
        self.value = np.where(where, x, self.x).reshape(self.value.shape)

    def absorb(self, g: np.ndarray) -> None:
        """What a dense answer does to the moments."""
        beta1, beta2 = self.betas
        self.updates += 1
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g**2

    def current_preconditioner(self, floor: float = 0.0) -> np.ndarray:
        return preconditioner_of(self.v, self.updates, self.betas[1], self.eps, floor)

    def adamw(self, preconditioner: np.ndarray) -> None:
        """x = (1 - lr wd) x - lr/(1 - beta1^k) m P, where P > 0"""
        lr, decay = self.group.lr, self.group.weight_decay
        x = (1 - lr * decay) * self.x - lr / (1 - self.betas[0] ** self.updates) * self.m * preconditioner
        self.move(x, preconditioner > 0)

"""Birder for n workers in one process, as plainly as it can be written.

This program knows docs/protocol.md and the Birder section of the specification, and nothing of thinwire: it imports no
line of it. State is float64; only the worker's comparison is done in float32, because the protocol specifies it so. A
production run that agrees with this loop on every bit therefore agrees with the page, not with itself.

A float64 ``m`` differs from a float32 one in its last digits, so a comparison may fall the other way with a probability
of about 1e-7 an element: fixed seeds make that a fact about the test rather than a flake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.oracles.flat_space import WORD, Gradients, Group, lay_out

MASK64 = (1 << 64) - 1
ROLL_CALL_PERIOD = 256
DRAW_BITS = 24


# Random numbers ------------------------------------------------------------------------------------------------------


def splitmix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def key(*values: int) -> int:
    k = 0
    for value in values:
        k = splitmix((k + value) & MASK64)
    return k


def mix(counters: np.ndarray, k: int) -> np.ndarray:
    """`counters` are uint32; NumPy's unsigned arithmetic wraps modulo 2^32, which is what the page asks for."""
    low, high = np.uint32(k & 0xFFFFFFFF), np.uint32(k >> 32)
    x = counters.astype(np.uint32) ^ low
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x + high
    x = x * np.uint32(0x846CA68B)
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x9E3779B1)
    return x ^ (x >> np.uint32(15))


def draw(k: int, counters: np.ndarray) -> np.ndarray:
    """One uint32 for each 64-bit counter."""
    counters = counters.astype(np.uint64)
    result = np.empty(counters.shape, dtype=np.uint32)
    for high in np.unique(counters >> np.uint64(32)):
        here = counters >> np.uint64(32) == high
        low = (counters[here] & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        result[here] = mix(low, splitmix((k + int(high)) & MASK64))
    return result


def worker_uniform(seed: int, step: int, worker: int, elements: np.ndarray) -> np.ndarray:
    """r in [-1, 1), exact in float32: 24 bits."""
    h = draw(key(seed, 0, step, worker), elements)
    return (h.view(np.int32) >> 8).astype(np.float32) * np.float32(2.0**-23)


def owner_uniform(seed: int, step: int, level: int, elements: np.ndarray) -> np.ndarray:
    """U_level: a 24-bit integer for each element, its highest bit from the level's first plane."""
    number = np.zeros(elements.shape, dtype=np.int64)
    for i in range(DRAW_BITS):
        plane = splitmix((key(seed, 1, step) + DRAW_BITS * level + i) & MASK64)
        words = draw(plane, elements >> 5)
        bit = (words >> (elements & 31).astype(np.uint32)) & np.uint32(1)
        number |= bit.astype(np.int64) << (DRAW_BITS - 1 - i)
    return number


def drawn_worker(seed: int, step: int, workers: int, elements: np.ndarray) -> np.ndarray:
    """For each element the worker whose bit the owner passes on."""
    low = np.zeros(elements.shape, dtype=np.int64)
    high = np.full(elements.shape, workers, dtype=np.int64)
    level = 0
    while np.any(high - low > 1):
        undecided = high - low > 1
        middle = low + (high - low + 1) // 2
        threshold = ((middle - low) << DRAW_BITS) // (high - low)
        left = owner_uniform(seed, step, level, elements) < threshold
        high = np.where(undecided & left, middle, high)
        low = np.where(undecided & ~left, middle, low)
        level += 1
    return low


# The optimizer -------------------------------------------------------------------------------------------------------


@dataclass
class Parameter:
    """A parameter where it lies in the flat space, with what every worker keeps for it (first axis: worker)."""

    value: np.ndarray
    group: Group
    elements: np.ndarray
    m: np.ndarray
    b: np.ndarray
    alive: np.ndarray

    @property
    def activity_refresh_words(self) -> np.ndarray:
        return (self.elements // WORD) % ROLL_CALL_PERIOD


@dataclass(frozen=True)
class Outcome:
    """What a step decided, in the parameters' shapes: `votes` is the number of +1 answered, 0 or 1 for one bit."""

    skipped: bool
    votes: list[np.ndarray] = field(default_factory=list)
    moved: list[np.ndarray] = field(default_factory=list)


class BirderOracle:
    """`groups` hold the starting values; `step` takes gradients as ``[worker][parameter]``, None where absent.

    In a hierarchical topology a worker is a node, and its gradient the mean of its ranks'. `compressed=False` is the
    rule of a single node, which sends no bits.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        workers: int,
        *,
        beta: float = 0.7,
        beta_b: float | None = 0.95,
        gain: float | None = None,
        eps: float = 1e-12,
        amsgrad: bool = False,
        maximize: bool = False,
        downlink: str = "bit",
        seed: int = 0,
        compressed: bool = True,
    ) -> None:
        self.groups = list(groups)
        self.workers = workers
        self.beta, self.eps = beta, eps
        self.beta_b = beta if beta_b is None else beta_b
        usual = 2.0 if downlink == "bit" else 1.5
        self.gain = gain if gain is not None else 1.0 if beta_b is None else usual
        self.amsgrad, self.maximize, self.downlink = amsgrad, maximize, downlink
        self.seed = seed
        self.compressed = compressed
        self.step_number = 0
        self.parameters = self._lay_out()

    def _lay_out(self) -> list[Parameter]:
        parameters = []
        for place in lay_out(self.groups):
            size = place.value.size
            state = (self.workers, size)
            alive = np.zeros(size, dtype=bool)
            parameters.append(Parameter(*place, m=np.zeros(state), b=np.zeros(state), alive=alive))
        return parameters

    @property
    def values(self) -> list[np.ndarray]:
        return [p.value for p in self.parameters]

    def step(self, gradients: Gradients) -> Outcome:
        self.step_number += 1
        nonfinite = self._absorb(gradients)
        if not self.compressed:
            return self._step_uncompressed(gradients, nonfinite)
        if self.step_number == 1:
            self._greet()
        if nonfinite:
            return Outcome(skipped=True)

        outcome = Outcome(skipped=False)
        for index, p in enumerate(self.parameters):
            present = any(worker[index] is not None for worker in gradients)
            votes, answered_hello = self._exchange(p)
            moving = p.alive & present
            self._apply(p, votes, moving)
            outcome.votes.append(votes.reshape(p.value.shape))
            outcome.moved.append(moving.reshape(p.value.shape))
            self._hear(p, answered_hello)
        return outcome

    def _step_uncompressed(self, gradients: Gradients, nonfinite: bool) -> Outcome:
        """A single node: x <- (1 - lr wd) x - lr m / (b + eps), and no step where there is no signal."""
        (of_node,) = gradients
        if nonfinite:
            return Outcome(skipped=True)
        outcome = Outcome(skipped=False)
        for p, gradient in zip(self.parameters, of_node, strict=True):
            moving = self._life(p) & (gradient is not None)
            u = np.divide(p.m[0], (p.b[0] + self.eps) * self.level, out=np.zeros_like(p.m[0]), where=moving)
            u = np.clip(u, -1, 1)
            x = p.value.reshape(-1)
            moved = (1 - p.group.lr * p.group.weight_decay) * x - p.group.lr * u
            p.value = np.where(moving, moved, x).reshape(p.value.shape)
            outcome.moved.append(moving.reshape(p.value.shape))
        return outcome

    def _absorb(self, gradients: Gradients) -> bool:
        """Local rule. An element whose gradient is not finite keeps its m and b; the return value is the flag."""
        nonfinite = False
        for worker, of_worker in enumerate(gradients):
            for p, gradient in zip(self.parameters, of_worker, strict=True):
                if gradient is None:
                    continue
                g = gradient.reshape(-1).astype(np.float64)
                if self.maximize:
                    g = -g
                finite = np.isfinite(g)
                nonfinite |= not finite.all()
                g = np.where(finite, g, 0.0)
                m = self.beta * p.m[worker] + (1 - self.beta) * g
                b = self.beta_b * p.b[worker] + (1 - self.beta_b) * np.abs(g)
                if self.amsgrad:
                    b = np.maximum(b, p.b[worker])
                p.m[worker] = np.where(finite, m, p.m[worker])
                p.b[worker] = np.where(finite, b, p.b[worker])
        return nonfinite

    @property
    def level(self) -> float:
        """Both averages begin at zero; by now so much more of m than of b is of gradients. The gain makes less of b."""
        return (1 - self.beta**self.step_number) / (1 - self.beta_b**self.step_number) / self.gain

    def _life(self, p: Parameter) -> np.ndarray:
        """The *or* over workers of what each says about its own coordinates."""
        signal = np.abs(p.m) if self.amsgrad else p.b
        return np.any(signal > self.eps, axis=0)

    def _greet(self) -> None:
        for p in self.parameters:
            p.alive |= self._life(p)

    def _exchange(self, p: Parameter) -> tuple[np.ndarray, np.ndarray]:
        """The owner's answer where the coordinate lives, and the *or* of the hellos where it does not."""
        bits = np.empty((self.workers, p.elements.size), dtype=bool)
        for worker in range(self.workers):
            r = worker_uniform(self.seed, self.step_number, worker, p.elements)
            m, b = p.m[worker].astype(np.float32), p.b[worker].astype(np.float32)
            bits[worker] = m > r * ((b + np.float32(self.eps)) * np.float32(self.level))
        if self.downlink == "votes":
            votes = bits.sum(axis=0)
        elif self.downlink == "majority":
            in_favour, against = bits.sum(axis=0), (~bits).sum(axis=0)
            casting = bits[self.step_number % self.workers]
            votes = np.where(in_favour == against, casting, in_favour > against).astype(np.int64)
        else:
            chosen = drawn_worker(self.seed, self.step_number, self.workers, p.elements)
            votes = bits[chosen, np.arange(p.elements.size)].astype(np.int64)
        return votes, self._life(p) & ~p.alive

    def _apply(self, p: Parameter, votes: np.ndarray, moving: np.ndarray) -> None:
        cast = self.workers if self.downlink == "votes" else 1
        direction = (2 * votes - cast) / cast
        x = p.value.reshape(-1)
        moved = (1 - p.group.lr * p.group.weight_decay) * x - p.group.lr * direction
        p.value = np.where(moving, moved, x).reshape(p.value.shape)

    def _hear(self, p: Parameter, answered_hello: np.ndarray) -> None:
        """Hello wakes coordinates from the next step on; roll call replaces the map of the words whose turn it is."""
        called = p.activity_refresh_words == self.step_number % ROLL_CALL_PERIOD
        p.alive = np.where(called, self._life(p), p.alive | answered_hello)

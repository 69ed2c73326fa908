"""Compressed averaging of gradients for n workers in one process: residuals at workers and at owners.

Nothing of thinwire is imported. A compressor is a function from a vector and the keys of its random numbers to what the
receiver decodes, over one shard of the flat space, padding included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.oracles.birder import draw, key
from tests.oracles.flat_space import TOO_LARGE, WORD, cut
from tests.oracles.quantize import encode
from tests.oracles.sketched_amsgrad import CountSketch

WORKER, OWNER, SHARED = 0, 1, 3
"""The numbers that set the keys of these random numbers apart."""


@dataclass(frozen=True)
class Keys:
    """`own` differs between the senders of a vector, and `shared` does not."""

    own: int
    shared: int


Compress = Callable[[np.ndarray, Keys], np.ndarray]


@dataclass
class AveragingOracle:
    """The mean of the workers' gradients over the flat space, as compression leaves it.

    `flat` arrays have the padding, which is zero. Without a residual, what a message leaves out is lost.
    """

    numels: Sequence[int]
    workers: int
    up: Compress
    down: Compress
    slices: int = 1
    bucket_elements: int = 1 << 40
    worker_residual: bool = True
    owner_residual: bool = True
    sums: bool = False
    seed: int = 0
    residuals: np.ndarray = field(init=False)
    answer_residual: np.ndarray = field(init=False)
    lost: list[float] = field(init=False)

    def __post_init__(self) -> None:
        starts = np.cumsum([0] + [-(-n // WORD) * WORD for n in self.numels[::-1]])
        self.shards = cut(int(starts[-1]) // WORD, self.workers * self.slices, self.bucket_elements)
        self.size = (self.shards[-1].first + self.shards[-1].length) * WORD
        self.places = [slice(start, start + n) for start, n in zip(starts[:-1], self.numels[::-1], strict=True)][::-1]
        self.live = np.zeros(self.size, dtype=bool)
        for place in self.places:
            self.live[place] = True
        self.residuals = np.zeros((self.workers, self.size))
        self.answer_residual = np.zeros(self.size)
        self.step_number = 0

    def flat(self, of_parameters: Sequence[np.ndarray | None]) -> np.ndarray:
        joined = np.zeros(self.size)
        for place, values in zip(self.places, of_parameters, strict=True):
            if values is not None:
                joined[place] = values.reshape(-1)
        return joined

    def step(self, gradients: Sequence[Sequence[np.ndarray | None]]) -> list[np.ndarray]:
        """The answers, by parameter, to the gradients, by worker and parameter."""
        self.step_number += 1
        answer = np.zeros(self.size)
        wanted = np.stack([self.flat(of_worker) for of_worker in gradients]) + self.residuals
        wanted = np.where(np.abs(wanted) < TOO_LARGE, wanted, self.residuals)
        sent = np.zeros_like(wanted)
        for number, shard in enumerate(self.shards):
            here = slice(shard.first * WORD, (shard.first + shard.length) * WORD)
            shared = key(self.seed, SHARED, self.step_number, number)
            for worker in range(self.workers):
                own = key(self.seed, WORKER, self.step_number, worker, number)
                sent[worker, here] = self.up(wanted[worker, here], Keys(own, shared))
            total = sent[:, here].sum(axis=0) if self.sums else sent[:, here].mean(axis=0)
            merged = np.where(self.live[here], total + self.answer_residual[here], 0.0)
            answer[here] = self.down(merged, Keys(key(self.seed, OWNER, self.step_number, number), shared))
            if self.owner_residual:
                self.answer_residual[here] = np.where(self.live[here], merged - answer[here], 0.0)
        left_out = np.where(self.live, wanted - sent, 0.0)
        self.lost = [float(np.sum(left**2) / np.sum(c**2)) for left, c in zip(left_out, wanted, strict=True)]
        if self.worker_residual:
            self.residuals = left_out
        return [answer[place] for place in self.places]


# Compressors ---------------------------------------------------------------------------------------------------------


def exact(values: np.ndarray, keys: Keys) -> np.ndarray:
    return values


def top_k(ratio: float) -> Compress:
    """The ⌈ratio·d⌉ elements with the largest magnitude; of equals the first."""

    def compress(values: np.ndarray, keys: Keys) -> np.ndarray:
        picked = np.lexsort((np.arange(values.size), -np.abs(values)))[: int(np.ceil(ratio * values.size))]
        sent = np.zeros_like(values)
        sent[picked] = values[picked]
        return sent

    return compress


def random_k(ratio: float) -> Compress:
    """One element of each of ⌈ratio·d⌉ ranges, which all workers and the owner draw alike."""

    def compress(values: np.ndarray, keys: Keys) -> np.ndarray:
        d, k = values.size, int(np.ceil(ratio * values.size))
        numbers = draw(keys.shared, np.arange(k))
        sent = np.zeros_like(values)
        for j in range(k):
            first, end = j * d // k, (j + 1) * d // k
            picked = first + (int(numbers[j]) * (end - first) >> 32)
            sent[picked] = values[picked]
        return sent

    return compress


def chunked_top_k(k: int) -> Compress:
    """±s or ±s/3 for the k largest of 4096, except for those below a sixth of the largest."""

    def compress(values: np.ndarray, keys: Keys) -> np.ndarray:
        sent = np.zeros_like(values)
        for first in range(0, values.size, 4096):
            chunk = values[first : first + 4096]
            largest = np.abs(chunk).max()
            picked = [i for i in np.argsort(-np.abs(chunk), kind="stable")[:k] if np.abs(chunk[i]) > largest / 6]
            if picked:
                q = np.sign(chunk[picked]) * np.where(np.abs(chunk[picked]) > largest * 2 / 3, 1.0, 1 / 3)
                sent[first + np.array(picked)] = np.float32(chunk[picked] @ q / (q @ q)) * q
        return sent

    return compress


def cosine_table() -> np.ndarray:
    """The DCT-II with orthogonal rows, of 64 points, in multiples of 2 to the power of -19."""
    h, x = np.arange(64)[:, None], np.arange(64)[None, :]
    table = np.sqrt(2 / 64) * np.cos(np.pi * (x + 0.5) * h / 64)
    table[0] = np.sqrt(1 / 64)
    return np.round(table * 2.0**19)


def dct_top_k(k: int) -> Compress:
    """The k largest coefficients of each 64 x 64, as multiples of a 127th of the largest."""

    def compress(values: np.ndarray, keys: Keys) -> np.ndarray:
        table, sent = cosine_table(), np.zeros_like(values)
        for first in range(0, values.size, 4096):
            chunk = np.zeros(4096)
            chunk[: values.size - first] = values[first : first + 4096]
            coefficients = (table @ chunk.reshape(64, 64) @ table.T / 2.0**38).reshape(-1)
            picked = np.argsort(-np.abs(coefficients), kind="stable")[:k]
            scale = np.float32(np.abs(coefficients[picked]).max() / 127)
            codes = np.zeros(4096)
            if scale > 0:
                codes[picked] = np.clip(np.round(coefficients[picked] / float(scale)), -127, 127)
            # Integers below 2 to the power of 53: no sum is rounded.
            decoded = table.T @ codes.reshape(64, 64) @ table * (float(scale) / 2.0**38)
            sent[first : first + 4096] = decoded.astype(np.float32).reshape(-1)[: values.size - first]
        return sent

    return compress


def fractions(own: int, count: int) -> np.ndarray:
    """In [0, 1), 24 bits."""
    return (draw(own, np.arange(count)) >> np.uint32(8)) / 2.0**24


def levels(s: int, block: int, norm: str) -> Compress:
    """QSGD, and TernGrad for s = 1 and the largest magnitude."""

    def compress(values: np.ndarray, keys: Keys) -> np.ndarray:
        random, sent = fractions(keys.own, values.size), np.zeros_like(values)
        for first in range(0, values.size, block):
            x, r = values[first : first + block], random[first : first + block]
            n = np.abs(x).max() if norm == "max" else np.sqrt(np.sum(x**2))
            if n > 0:
                lower = np.floor(s * np.abs(x) / n)
                level = np.minimum(lower + (r < s * np.abs(x) / n - lower), s)
                sent[first : first + block] = np.sign(x) * level * np.float32(n) / s
        return sent

    return compress


def natural(values: np.ndarray, keys: Keys) -> np.ndarray:
    """A power of two next to each element."""
    random = (draw(keys.own, np.arange(values.size)) >> np.uint32(9)) / 2.0**23
    sent = np.zeros_like(values)
    at = np.flatnonzero(np.abs(values) >= 2.0**-126)
    lower = 2.0 ** np.floor(np.log2(np.abs(values[at])))
    sent[at] = np.sign(values[at]) * np.where(random[at] < np.abs(values[at]) / lower - 1, 2 * lower, lower)
    return sent


def scaled_sign(block: int | None) -> Compress:
    """The mean magnitude of a block, or of all, times the sign; that of zero is positive."""

    def compress(values: np.ndarray, keys: Keys) -> np.ndarray:
        sent = np.zeros_like(values)
        for first in range(0, values.size, block or values.size):
            here = slice(first, first + (block or values.size))
            sent[here] = np.float32(np.abs(values[here]).mean()) * np.where(values[here] >= 0, 1.0, -1.0)
        return sent

    return compress


def half_means(block: int) -> Compress:
    """1-bit SGD: the mean of the elements of a block that have the same sign."""

    def compress(values: np.ndarray, keys: Keys) -> np.ndarray:
        sent = np.zeros_like(values)
        for first in range(0, values.size, block):
            x = values[first : first + block]
            for half in (x >= 0, x < 0):
                if half.any():
                    sent[first : first + block][half] = np.float32(x[half].mean())
        return sent

    return compress


def fixed_sign(scale: float) -> Compress:
    """±scale; the sign of zero is random."""

    def compress(values: np.ndarray, keys: Keys) -> np.ndarray:
        coin = draw(keys.own, np.arange(values.size)) >= 2**31
        return scale * np.where((values > 0) | ((values == 0) & coin), 1.0, -1.0)

    return compress


# Sketches ------------------------------------------------------------------------------------------------------------


class SketchedOracle(AveragingOracle):
    """Sketched-SGD: the owner of a shard keeps sketches of the momentum and of what its answers left out."""

    def __init__(
        self,
        numels: Sequence[int],
        workers: int,
        *,
        ratio: float,
        cells: float,
        rows: int,
        momentum: float,
        seed: int,
        slices: int,
        bucket_elements: int,
    ) -> None:
        super().__init__(numels, workers, exact, top_k(ratio), slices, bucket_elements, seed=seed)
        self.momentum = momentum
        lengths = [shard.length * WORD for shard in self.shards]
        columns = [max(1, int(cells * length / rows)) for length in lengths]
        self.sketches = [
            CountSketch(rows, count, seed, np.arange(length)) for count, length in zip(columns, lengths, strict=True)
        ]
        self.u = [np.zeros((rows, count)) for count in columns]
        self.e = [np.zeros((rows, count)) for count in columns]

    def step(self, gradients: Sequence[Sequence[np.ndarray | None]]) -> list[np.ndarray]:
        answer = np.zeros(self.size)
        g = np.stack([self.flat(of_worker) for of_worker in gradients])
        for number, (shard, sketch) in enumerate(zip(self.shards, self.sketches, strict=True)):
            here = slice(shard.first * WORD, (shard.first + shard.length) * WORD)
            tables = [sketch.table(of_worker) for of_worker in g[:, here]]
            self.u[number] = self.momentum * self.u[number] + np.mean(tables, axis=0)
            self.e[number] += self.u[number]
            estimate = np.where(self.live[here], sketch.estimate(self.e[number]), 0.0)
            answer[here] = self.down(estimate, Keys(0, 0))
            self.e[number] -= sketch.table(answer[here])
        return [answer[place] for place in self.places]


# Lazy aggregation -----------------------------------------------------------------------------------------------------


@dataclass
class Lazy:
    """LAQ's sender of the changes of one shard: what it has left out in its last message, and how long ago that was."""

    bits: int
    block: int
    patience: float
    max_age: int
    error: float = 0.0
    age: int = 0

    def send(self, change: np.ndarray, average_square: float) -> np.ndarray | None:
        """What is sent of a change; None if nothing is."""
        _, _, delta = encode(change.astype(np.float32), self.bits, self.block, 1.0)
        error = float(np.sum((change - delta).astype(np.float64) ** 2))
        small = np.sum(delta.astype(np.float64) ** 2) <= self.patience * average_square + 3 * (error + self.error)
        if small and self.age < self.max_age:
            self.age += 1
            return None
        self.error, self.age = error, 0
        return delta


class LaqOracle(AveragingOracle):
    """LAQ (Sun et al., NeurIPS 2019), packet by packet; owners are lazy too. `silent` has the packets of the last
    step that had no payload: the number of their shard and their worker, or None for the answer."""

    def __init__(
        self,
        numels: Sequence[int],
        workers: int,
        *,
        bits: int = 4,
        block: int = 64,
        patience: float = 0.8,
        history: int = 10,
        max_age: int = 100,
        slices: int = 1,
        bucket_elements: int = 1 << 40,
    ) -> None:
        none = {"worker_residual": False, "owner_residual": False}
        super().__init__(numels, workers, exact, exact, slices, bucket_elements, **none)
        self.history = history
        self.known = np.zeros((workers, self.size), np.float32)
        self.mean, self.followed = np.zeros(self.size, np.float32), np.zeros(self.size, np.float32)
        self.squares = [0.0 for _ in self.shards]
        self.senders = {
            (number, sender): Lazy(bits, block, patience, max_age)
            for number in range(len(self.shards))
            for sender in [*range(workers), None]
        }
        self.silent: set[tuple[int, int | None]] = set()

    def step(self, gradients: Sequence[Sequence[np.ndarray | None]]) -> list[np.ndarray]:
        g = np.stack([self.flat(of_worker) for of_worker in gradients]).astype(np.float32)
        wanted, lost = np.zeros(self.workers), np.zeros(self.workers)
        self.silent = set()
        for number, shard in enumerate(self.shards):
            here = slice(shard.first * WORD, (shard.first + shard.length) * WORD)
            for worker in range(self.workers):
                change = g[worker, here] - self.known[worker, here]
                delta = self._send(number, worker, change)
                self.known[worker, here] += delta
                self.mean[here] += delta * np.float32(1 / self.workers)
                wanted[worker] += np.sum(change.astype(np.float64) ** 2)
                lost[worker] += np.sum((change - delta).astype(np.float64) ** 2)
            self.followed[here] += self._send(number, None, self.mean[here] - self.followed[here])
            square = float(np.sum(self.followed[here].astype(np.float64) ** 2))
            self.squares[number] += (square - self.squares[number]) / self.history
        self.lost = list(lost / wanted)
        return [self.followed[place] for place in self.places]

    def _send(self, number: int, sender: int | None, change: np.ndarray) -> np.ndarray:
        delta = self.senders[number, sender].send(change, self.squares[number])
        if delta is None:
            self.silent.add((number, sender))
            return np.zeros_like(change)
        return delta

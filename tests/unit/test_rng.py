"""The random bits are unbiased and independent, measured on the kernels that training runs.

Every check is "within 5 standard deviations", which pure chance fails once in 1.7 million checks. There are under 1,500
of them here and all numbers are fixed by their seeds: a sound sampler would have had one chance in a thousand to fail
on the day this was written, and none since. That every backend draws the numbers of docs/protocol.md is checked against
the oracle, so the statistics are taken on one backend only: the fastest there is.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.oracles import birder as oracle
from thinwire.kernels import native, ops, rng
from thinwire.kernels.ops import Kernels

SIZE = 1 << 20
SIGMAS = 5.0
BACKENDS = ["reference", *(["native"] if native.available() else [])]


@pytest.fixture
def kernels() -> Kernels:
    return ops.backend(torch.device("cpu"))


def sampled_signs(
    kernels: Kernels, u: float, *, seed: int = 0, step: int = 1, worker: int = 0, size: int = SIZE
) -> np.ndarray:
    """One draw of Q(u) = ±1 for each of `size` elements, by the kernel that encodes a worker's packet."""
    packets = torch.zeros(size // 8, dtype=torch.uint8)
    kernels.birder_encode(
        torch.tensor([[0, 0, size, 0, 0, 0]]),
        None,
        torch.full((size,), u),
        torch.ones(size),
        torch.full((size // 64,), -1),
        packets,
        beta=0.8,
        eps=0.0,
        scale=1.0,
        amsgrad=False,
        key=rng.worker_key(seed, step, worker),
    )
    return 2.0 * np.unpackbits(packets.numpy(), bitorder="little") - 1.0


def answered(kernels: Kernels, rows: torch.Tensor, *, seed: int = 0, step: int = 1) -> np.ndarray:
    """The owner's answer (0 or 1) to `rows` of packed votes, every element active."""
    size = 8 * rows.shape[1]
    answer = torch.zeros(size // 8, dtype=torch.uint8)
    kernels.vote_bit(
        rows,
        0,
        torch.full((size // 64,), -1),
        first_word=0,
        words=size // 64,
        answer=answer,
        answer_byte=0,
        key=rng.owner_key(seed, step),
        signal=None,
    )
    return np.unpackbits(answer.numpy(), bitorder="little").astype(np.float64)


def rows_voting(workers: int, in_favour: list[int], size: int = SIZE) -> torch.Tensor:
    rows = torch.zeros((workers, size // 8), dtype=torch.uint8)
    rows[in_favour] = 255
    return rows


def z_of_correlation(a: np.ndarray, b: np.ndarray, mean: float = 0.0) -> float:
    """Standard deviations from zero of the correlation of two ±1 sequences whose expectation is `mean`."""
    variance = 1.0 - mean**2
    return float(((a - mean) * (b - mean)).sum() / (variance * math.sqrt(a.size)))


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_draws_the_numbers_of_the_protocol(name: str) -> None:
    kernels = ops.BACKENDS[name]
    size = 1 << 14
    elements = np.arange(size)
    r = oracle.worker_uniform(9, 3, 2, elements)
    for u in (-0.3, 0.0, 0.7):
        np.testing.assert_array_equal(
            sampled_signs(kernels, u, seed=9, step=3, worker=2, size=size) > 0, np.float32(u) > r
        )
    for workers in (2, 3, 5, 8):
        chosen = oracle.drawn_worker(9, 3, workers, elements)
        for worker in range(workers):
            answers = answered(kernels, rows_voting(workers, [worker], size), seed=9, step=3)
            np.testing.assert_array_equal(answers == 1, chosen == worker)


@pytest.mark.parametrize("u", [round(-1 + 0.1 * k, 1) for k in range(21)])
def test_frequency_is_unbiased(kernels: Kernels, u: float) -> None:
    """E[Q(u)] = u (law 4)."""
    u32 = float(np.float32(u))
    mean = sampled_signs(kernels, u).mean()
    assert abs(mean - u32) <= SIGMAS * math.sqrt((1 - u32**2) / SIZE)  # at u = ±1 that is exactness


@pytest.mark.parametrize("u", [0.0, 0.9])
def test_steps_workers_and_seeds_are_independent(kernels: Kernels, u: float) -> None:
    origin = sampled_signs(kernels, u)
    mean = float(np.float32(u))
    others = [{"step": 1 + k} for k in (1, 2, 3, 256)]
    others += [{"worker": k} for k in (1, 2, 3, 7)]
    others += [{"seed": k} for k in (1, 2, 2**31, 2**63)]
    others += [{"step": 2, "worker": 1}, {"step": 2, "seed": 1}, {"seed": 1, "worker": 1}]
    for other in others:
        z = z_of_correlation(origin, sampled_signs(kernels, u, **other), mean)
        assert abs(z) <= SIGMAS, f"{other} correlates with the first draw: z = {z:.1f}"


@pytest.mark.parametrize("u", [0.0, 0.9])
def test_neighbours_are_independent(kernels: Kernels, u: float) -> None:
    """By distance, and by flipped index bits, because the hash begins with an exclusive or."""
    signs = sampled_signs(kernels, u, step=5)
    mean = float(np.float32(u))
    for lag in [*range(1, 130), 256, 1000, 1024, 4096, 65536]:
        z = z_of_correlation(signs[:-lag], signs[lag:], mean)
        assert abs(z) <= SIGMAS, f"lag {lag}: z = {z:.1f}"
    index = np.arange(SIZE)
    for flipped in (1 << k for k in range(20)):
        lower = index[index & flipped == 0]
        z = z_of_correlation(signs[lower], signs[lower ^ flipped], mean)
        assert abs(z) <= SIGMAS, f"indices that differ by {flipped:#x}: z = {z:.1f}"


def test_neighbours_are_independent_across_steps_and_workers(kernels: Kernels) -> None:
    """A hash that only shifted its counter by the key would pass all of the above and fail here."""
    first = sampled_signs(kernels, 0.0)
    for other in ({"step": 2}, {"worker": 1}):
        second = sampled_signs(kernels, 0.0, **other)
        for lag in range(1, 65):
            for a, b in ((first[:-lag], second[lag:]), (first[lag:], second[:-lag])):
                z = z_of_correlation(a, b)
                assert abs(z) <= SIGMAS, f"{other} at lag {lag}: z = {z:.1f}"


def test_eight_neighbours_take_all_values_equally(kernels: Kernels) -> None:
    """Bytes of eight neighbouring bits are uniform over 256 values: chi-square with 255 degrees of freedom."""
    bits = (sampled_signs(kernels, 0.0, step=9) > 0).astype(np.uint8)
    counts = np.bincount(np.packbits(bits), minlength=256)
    expected = counts.sum() / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 255) <= SIGMAS * math.sqrt(2 * 255)


@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_the_owners_answer_is_as_frequent_as_the_votes(kernels: Kernels, workers: int) -> None:
    """P(+1) = c / n, whoever the c are."""
    for c in range(workers + 1):
        for first in {0, workers // 2, workers - 1}:
            in_favour = [(first + k) % workers for k in range(c)]
            frequency = answered(kernels, rows_voting(workers, in_favour), step=c + 1).mean()
            p = c / workers
            allowed = SIGMAS * math.sqrt(p * (1 - p) / SIZE) + (0 < c < workers) * 2.0**-22  # thresholds have 24 bits
            assert abs(frequency - p) <= allowed, f"{in_favour} of {workers} in favour"


@pytest.mark.parametrize("workers", [2, 3])
def test_the_owners_draws_are_independent(kernels: Kernels, workers: int) -> None:
    """Between steps, between neighbours, and of the workers' own draws under the same seed."""
    mean = 2 / workers - 1
    rows = rows_voting(workers, [0])
    first = 2 * answered(kernels, rows) - 1
    for step in (2, 3, 257):
        assert abs(z_of_correlation(first, 2 * answered(kernels, rows, step=step) - 1, mean)) <= SIGMAS
    for lag in [*range(1, 70), 128, 1024]:
        assert abs(z_of_correlation(first[:-lag], first[lag:], mean)) <= SIGMAS, f"lag {lag}"
    for worker in range(workers):
        signs = sampled_signs(kernels, 0.0, worker=worker)
        z = float(((first - mean) * signs).sum() / math.sqrt((1 - mean**2) * SIZE))
        assert abs(z) <= SIGMAS, f"the owner's draw and worker {worker}'s correlate: z = {z:.1f}"


@pytest.mark.parametrize("count", [0, 1, 1000, 2**16, 2**16 + 3])
@pytest.mark.parametrize("first", [0, 77, 2**31 - 2**17])
@pytest.mark.parametrize("key", [0, 2**63 + 12345, 2**64 - 1])
def test_draws_of_a_range_are_those_of_draw(key: int, first: int, count: int) -> None:
    """To the bit; and fractions are their upper 24 bits."""
    cpu, last = torch.device("cpu"), first + count
    drawn = rng.draw(key, torch.arange(first, last))
    ranged = rng.draw_range(key, first, last, cpu)
    assert ranged.dtype == torch.int32
    assert torch.equal(ranged.to(torch.int64) & 0xFFFFFFFF, drawn)
    assert torch.equal(rng.fractions(key, first, last, cpu).double(), (drawn >> 8).double() / 2**24)

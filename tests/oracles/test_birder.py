"""The oracle judges the product, so what can be known about it without the product is checked here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.oracles.birder import BirderOracle, Group, draw, drawn_worker, key, mix, splitmix, worker_uniform


def mix_in_plain_integers(c: int, k: int) -> int:
    x = c ^ (k & 0xFFFFFFFF)
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = (x + (k >> 32)) % 2**32
    x = x * 0x846CA68B % 2**32
    x ^= x >> 16
    x = x * 0x9E3779B1 % 2**32
    return x ^ (x >> 15)


def test_splitmix_gives_the_published_sequence() -> None:
    # The first outputs of SplitMix64 started at 0 and at 1234567, as its reference implementations print them.
    assert splitmix(0) == 0xE220A8397B1DCDAF
    assert splitmix(1234567) == 6457827717110365317


def test_mix_equals_plain_integers() -> None:
    counters = np.array([0, 1, 31, 2**31, 2**32 - 1], dtype=np.uint32)
    for k in (0, 1, key(7, 0, 1, 2), 2**64 - 1):
        assert mix(counters, k).tolist() == [mix_in_plain_integers(int(c), k) for c in counters]


def test_draw_uses_the_high_half_of_the_counter() -> None:
    counters = np.array([5, 5 + 2**32], dtype=np.uint64)
    k = key(3, 0, 9, 1)
    assert draw(k, counters).tolist() == [
        mix_in_plain_integers(5, splitmix(k)),
        mix_in_plain_integers(5, splitmix(k + 1)),
    ]


def test_worker_uniform_is_24_bits_in_its_interval() -> None:
    r = worker_uniform(1, 2, 3, np.arange(100_000)).astype(np.float64)
    assert -1 <= r.min() < r.max() < 1
    assert np.all(r * 2**23 == np.round(r * 2**23))
    assert abs(r.mean()) < 5 * np.sqrt(1 / 3 / r.size)


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_every_worker_is_drawn_equally_often(workers: int) -> None:
    size = 60_000
    counts = np.bincount(drawn_worker(4, 1, workers, np.arange(size)), minlength=workers)
    sigma = np.sqrt(size * (1 / workers) * (1 - 1 / workers))
    assert counts.sum() == size
    assert np.all(np.abs(counts - size / workers) <= 5 * sigma)


PAPER: dict[str, Any] = {"beta": 0.8, "beta_b": None}
"""The rule as it is printed: one beta, and no gain."""


def test_a_certain_sign_moves_by_the_learning_rate() -> None:
    oracle = BirderOracle([Group([np.array([1.0, -2.0, 3.0])], lr=0.5, weight_decay=0.1)], workers=2)
    gradient = np.array([1.0, -1.0, 0.0])
    outcome = oracle.step([[gradient], [gradient]])
    assert outcome.moved[0].tolist() == [True, True, False]
    np.testing.assert_allclose(oracle.values[0], [0.95 - 0.5, -1.9 + 0.5, 3.0], rtol=1e-12)


def test_the_casting_vote_goes_round_in_ties() -> None:
    oracle = BirderOracle([Group([np.zeros(3)], lr=1.0)], workers=4, beta=0.0, downlink="majority")
    # The first coordinate is tied; of the others one is lost by 1 to 3, and one is won by 3 to 1.
    votes = np.array([[1.0, 1.0, 1.0], [1.0, -1.0, 1.0], [-1.0, -1.0, 1.0], [-1.0, -1.0, -1.0]])
    outcomes = [oracle.step([[of_worker] for of_worker in votes]).votes[0].tolist() for _ in range(5)]
    # Step 1 is worker 1's, step 4 worker 0's, and step 5 worker 1's again.
    assert outcomes == [[1, 0, 1], [0, 0, 1], [0, 0, 1], [1, 0, 1], [1, 0, 1]]


def test_what_never_had_a_gradient_rests_and_hello_wakes_it_for_the_next_step() -> None:
    oracle = BirderOracle([Group([np.ones(2)], lr=0.5)], workers=2)
    quiet, loud = np.array([1.0, 0.0]), np.array([1.0, 1.0])
    for gradients in ([quiet, quiet], [quiet, quiet], [quiet, loud]):
        oracle.step([[g] for g in gradients])
        assert oracle.values[0][1] == 1.0
    assert oracle.step([[quiet], [loud]]).moved[0].tolist() == [True, True]
    assert abs(oracle.values[0][1] - 1.0) == 0.5


def test_activity_refresh_lays_a_stopped_coordinate_to_rest() -> None:
    oracle = BirderOracle([Group([np.zeros(2)], lr=1.0)], workers=1, **PAPER)
    for step in range(1, 400):
        oracle.step([[np.array([1.0, 1.0 if step < 10 else 0.0])]])
        # Word 0 is called at multiples of 256; 0.8^246 is far below eps.
        assert oracle.parameters[0].alive.tolist() == [True, step < 256]


def test_nonfinite_skips_and_spares_the_element() -> None:
    oracle = BirderOracle([Group([np.zeros(2)], lr=1.0)], workers=2, **PAPER)
    fine = np.array([1.0, 1.0])
    assert oracle.step([[fine], [np.array([np.nan, 1.0])]]).skipped
    (p,) = oracle.parameters
    assert p.value.tolist() == [0.0, 0.0]
    assert p.alive.all()
    np.testing.assert_allclose(p.b, [[0.2, 0.2], [0.0, 0.2]])
    assert not oracle.step([[fine], [fine]]).skipped
    assert np.abs(p.value).tolist() == [1.0, 1.0]


def test_without_compression_steps_are_m_over_b() -> None:
    group = Group([np.array([1.0, 1.0, 1.0])], lr=0.5, weight_decay=0.1)
    oracle = BirderOracle([group], workers=1, compressed=False, **PAPER)
    assert not oracle.step([[np.array([2.0, -1.0, 0.0])]]).skipped
    np.testing.assert_allclose(oracle.values[0], [0.95 - 0.5, 0.95 + 0.5, 1.0], rtol=1e-9)
    oracle.step([[np.array([-2.0, -1.0, 0.0])]])
    # m = 0.8 * 0.4 - 0.4 = -0.08 and b = 0.8 * 0.4 + 0.4 = 0.72
    np.testing.assert_allclose(oracle.values[0], [0.95 * 0.45 + 0.5 / 9, 0.95 * 1.45 + 0.5, 1.0], rtol=1e-9)
    before = oracle.values[0].copy()
    assert oracle.step([[np.array([np.inf, 1.0, 1.0])]]).skipped
    oracle.step([[None]])
    np.testing.assert_array_equal(oracle.values[0], before)


def test_a_beta_of_its_own_for_b_and_a_gain() -> None:
    group = Group([np.array([1.0, 1.0])], lr=0.5)
    oracle = BirderOracle([group], workers=1, compressed=False, beta=0.5, beta_b=0.8, gain=1.5)
    oracle.step([[np.array([2.0, -1.0])]])  # both averages have seen one gradient: u = 1.5, clamped to 1
    np.testing.assert_allclose(oracle.values[0], [0.5, 1.5], rtol=1e-9)
    oracle.step([[np.array([0.0, 4.0])]])
    # m = 0.5, 1.75 of 0.75; b = 0.32, 0.96 of 0.36: u = 1.5 (0.5 / 0.75) / (0.32 / 0.36) = 1.125, and 1.3125
    np.testing.assert_allclose(oracle.values[0], [0.0, 1.0], rtol=0, atol=1e-9)
    oracle.step([[np.array([-1.0, 0.0])]])
    # m = -0.25, 0.875 of 0.875; b = 0.456, 0.768 of 0.488: neither is clamped.
    u = np.array([1.5 * (-0.25 / 0.875) / (0.456 / 0.488), 1.5 / (0.768 / 0.488)])
    np.testing.assert_allclose(oracle.values[0], [0.0, 1.0] - 0.5 * u, rtol=1e-9)

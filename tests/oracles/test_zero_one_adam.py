"""The oracle of 0/1 Adam: its schedules, its local steps and their synchronisation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.oracles.flat_space import Group
from tests.oracles.test_flat_space import all_values, gradients_at, starting_values, zero_one
from tests.oracles.zero_one_adam import local_interval, variance_steps


def test_variance_steps() -> None:
    assert variance_steps(16, 130) == [
        *(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16),
        *(18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42, 44, 46, 48),
        *(52, 56, 60, 64, 68, 72, 76, 80, 84, 88, 92, 96, 100, 104, 108, 112),
        *(120, 128),
    ]
    assert variance_steps(2, 20) == [1, 2, 4, 6, 10, 14]
    assert variance_steps(16, 18)[-2:] == [16, 18]


def test_local_intervals() -> None:
    assert [local_interval(o, 3, 16) for o in range(1, 20)] == [1] * 3 + [2] * 3 + [4] * 3 + [8] * 3 + [16] * 7
    assert [local_interval(o, 2, 3) for o in range(1, 8)] == [1, 1, 2, 2, 3, 3, 3]


def test_steps_follow_the_schedules_and_replicas_are_equal_after_each_synchronisation() -> None:
    oracle = zero_one([Group(starting_values(), 0.01, 0.1)], 3, local_step_clipper=4)
    exchanges = []
    for step in range(1, 26):
        exchanges.append(oracle.step(gradients_at(step, 3)).exchange)
        synchronized = exchanges[-1] != "none"
        assert oracle.is_synchronized == synchronized
        first, *others = oracle.replicas
        for other in others:
            assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True)) == synchronized
    before_the_freeze = ["dense", "dense", "signs", "dense", "signs"]
    assert exchanges[:5] == before_the_freeze
    synchronising = [o for o, exchange in enumerate(exchanges[5:], start=1) if exchange == "signs"]
    assert synchronising == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert "dense" not in exchanges[5:]


def test_synchronize_is_an_exchange_without_a_step() -> None:
    oracle = zero_one([Group(starting_values(), 0.01, 0.1)], 2, local_step_scaler=1)
    for step in range(1, 5 + 5):
        oracle.step(gradients_at(step, 2))
    assert oracle.local_steps == 2
    p = oracle.parameters[0]
    lr_sum, decay, then = sum(0.01 / (1 - 0.9**t) for t in (8, 9)), 0.999**2, p.x_then
    oracle.synchronize()
    assert oracle.is_synchronized
    assert oracle.step_number == 9
    u = oracle.space.split(oracle.signs.y - oracle.signs.owner_errors)[0]
    np.testing.assert_allclose(p.m, np.stack([u, u]) / lr_sum, rtol=1e-9)
    np.testing.assert_allclose(oracle.values[0].reshape(-1), decay * then - u * p.P, rtol=1e-12)
    before = all_values(oracle)
    oracle.synchronize()
    np.testing.assert_array_equal(oracle.parameters[0].value, before[0])


def test_momentum_steps_of_one_element_are_adam_with_an_old_variance() -> None:
    """A scale says all about one element, so that nothing remains and the exchange is exact."""
    oracle = zero_one([Group([np.ones(1)], 0.1, 0.2)], 1, bucket_elements=64, betas=(0.5, 0.75), variance_floor=0.0)
    x, m, v = 1.0, 0.0, 0.0
    for step, g in enumerate((3.0, -2.0, 5.0, 1.0, -4.0), start=1):
        oracle.step([[np.array([g])]])
        m = 0.5 * m + 0.5 * g
        if step in (1, 2, 4):
            v = 0.75 * v + 0.25 * g * g
        variance_updates = (1, 2, 2, 3, 3)[step - 1]
        x = 0.98 * x - 0.1 / (1 - 0.5**step) * m / (math.sqrt(v / (1 - 0.75**variance_updates)) + 1e-8)
        np.testing.assert_allclose(oracle.values[0], [x], rtol=1e-7)
    np.testing.assert_allclose(oracle.parameters[0].P, 1 / (math.sqrt(v / (1 - 0.75**3)) + 1e-8), rtol=1e-12)


def test_local_steps_of_one_element_add_up_to_the_synchronised_one() -> None:
    groups = [Group([np.ones(1)], 0.1)]
    oracle = zero_one(groups, 1, bucket_elements=64, betas=(0.5, 0.75), var_freeze_step=1, local_step_scaler=2)
    oracle.step([[np.array([2.0])]])
    x, m, applied, rates = 1.0 - 0.1, 1.0, 0.0, 0.0
    for step, g in enumerate((3.0, -5.0, 5.0, 1.0, -4.0, 7.0, 2.0, 6.0), start=2):
        groups[0].lr = 0.1 * step
        outcome = oracle.step([[np.array([g])]])
        a = 0.1 * step / (1 - 0.5**step)
        m = 0.5 * m + 0.5 * g
        x, applied, rates = x - a * m / 2, applied + a * m, rates + a
        np.testing.assert_allclose(oracle.replicas[0][0], [x], rtol=1e-6)
        if outcome.exchange == "signs":
            m, applied, rates = applied / rates, 0.0, 0.0
        np.testing.assert_allclose(oracle.parameters[0].m, [[m]], rtol=1e-6)
    assert oracle.is_synchronized


def test_local_steps_keep_their_sum_for_the_owners() -> None:
    """What the replicas were meant to move by, mean over workers, is what they moved by and what remains in memory."""
    # A small beta1, so that bias correction ends at once and no learning rate falls: errors would shrink with it.
    options = {"local_step_scaler": 2, "var_freeze_step": 4, "betas": (0.1, 0.999)}
    oracle = zero_one([Group(starting_values(), 0.01)], 3, **options)
    for step in range(1, 5):
        oracle.step(gradients_at(step, 3))
    start = [value.reshape(-1) for value in oracle.values]
    wanted = [np.zeros_like(value) for value in start]
    for step in range(5, 4 + 17):
        before = [p.c.copy() for p in oracle.parameters]
        oracle.step(gradients_at(step, 3))
        for index, p in enumerate(oracle.parameters):
            after = oracle.space.split(oracle.signs.c)[index] if oracle.is_synchronized else p.c
            wanted[index] += (after - before[index]).mean(axis=0)
    assert oracle.is_synchronized
    remains = oracle.space.split(oracle.signs.worker_errors.mean(axis=0) + oracle.signs.owner_errors)
    for p, value, x, total, kept in zip(oracle.parameters, oracle.values, start, wanted, remains, strict=True):
        np.testing.assert_allclose((x - value.reshape(-1)) / p.P, total - kept, rtol=0, atol=1e-9)


def test_a_parameter_without_a_gradient_anywhere_keeps_its_momentum_and_stays() -> None:
    groups = [Group([np.ones(1), np.ones(1)], 0.1, 0.5)]
    oracle = zero_one(groups, 2, bucket_elements=64, var_freeze_step=1, local_step_scaler=2)
    g = np.array([1.0])
    oracle.step([[g, g], [g, g]])
    oracle.step([[g, g], [2 * g, 2 * g]])
    before = oracle.values[1].copy()
    momentum = oracle.parameters[1].m.copy()
    assert np.all(momentum > 0.2)
    oracle.step([[g, None], [g, None]])
    assert oracle.is_synchronized
    np.testing.assert_array_equal(oracle.parameters[1].m, momentum)
    np.testing.assert_array_equal(oracle.values[1], before)
    oracle.step([[g, None], [g, None]])
    np.testing.assert_array_equal(oracle.replicas[0][1], before)
    oracle.step([[g, None], [g, g]])
    assert oracle.is_synchronized
    assert oracle.values[1] != before


def test_bad_numbers_after_the_freeze_of_zero_one_adam() -> None:
    oracle = zero_one([Group(starting_values(), 0.1, 0.2)], 2)
    for step in range(1, 6):
        oracle.step(gradients_at(step, 2))

    def step_with_a_bad_number() -> tuple[Any, list[np.ndarray], list[np.ndarray]]:
        gradients = gradients_at(oracle.step_number + 1, 2)
        assert gradients[1][1] is not None
        gradients[1][1][3] = np.nan
        values, momenta = all_values(oracle), [p.m.copy() for p in oracle.parameters]
        return oracle.step(gradients), values, momenta

    # A synchronising step by itself is skipped by all, but gives them their momentum.
    outcome, values, momenta = step_with_a_bad_number()
    assert (outcome.exchange, outcome.stayed) == ("signs", [True, True])
    np.testing.assert_array_equal(all_values(oracle)[0], values[0])
    assert np.all(oracle.parameters[0].m != momenta[0])
    for step in range(7, 10):
        assert not oracle.step(gradients_at(step, 2)).skipped

    # In a local step the others go on; the worker keeps the momentum of that element only.
    outcome, values, momenta = step_with_a_bad_number()
    assert (outcome.exchange, outcome.stayed) == ("none", [False, True])
    for p, value, m in zip(oracle.parameters, values, momenta, strict=True):
        assert np.all(p.value[0] != value[0])
        np.testing.assert_array_equal(p.value[1], value[1])
        assert np.all(p.m[0] != m[0])
    kept = oracle.parameters[1].m[1] == momenta[1][1]
    assert np.flatnonzero(kept).tolist() == [3]

    # The step that synchronises them is not lost.
    outcome, values, _ = step_with_a_bad_number()
    assert (outcome.exchange, outcome.stayed) == ("signs", [False, False])
    for p, value in zip(oracle.parameters, values, strict=True):
        np.testing.assert_array_equal(p.value[0], p.value[1])
        assert np.all(p.value[0] != value[0])
    assert all(np.isfinite(value).all() for value in oracle.values)

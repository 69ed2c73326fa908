"""What can be known without the product about the oracle of SketchedAMSGrad, and what holds for that of CD-Adam too."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracles.birder import key
from tests.oracles.flat_space import Group
from tests.oracles.sketched_amsgrad import CountSketch, SketchedAMSGradOracle, hashes
from tests.unit.amsgrad_cases import (
    ELEMENTS,
    EVERY,
    gradients_at,
    joined,
    mean_of,
    partly_absent_at,
    sketched,
    spoilt,
    starting_values,
)

# The count sketch ----------------------------------------------------------------------------------------------------


def test_hashes_are_a_cubic_in_plain_integers() -> None:
    elements = [0, 1, 2, 63, 10**6, 2**31 - 2]
    for seed, row in ((0, 0), (7, 4), (2**63, 14)):
        a = [key(seed, 2, row, i) % (2**31 - 1) for i in range(4)]
        expected = [sum(a[i] * e**i for i in range(4)) % (2**31 - 1) for e in elements]
        assert hashes(seed, row, np.array(elements)).tolist() == expected
        sketch = CountSketch(row + 1, 100, seed, np.array(elements))
        assert sketch.signs[row].tolist() == [-1 if h % 2 else 1 for h in expected]
        assert sketch.columns[row].tolist() == [h // 2 * 100 // 2**30 for h in expected]


@pytest.mark.parametrize("columns", [1, 7, 1000, 1 << 30])
def test_columns_and_signs_are_in_range_and_evenly_spread(columns: int) -> None:
    size = 20_000
    sketch = CountSketch(3, columns, 5, np.arange(size))
    assert sketch.columns.min() >= 0
    assert sketch.columns.max() < columns
    assert set(np.unique(sketch.signs)) == {-1.0, 1.0}
    assert np.all(np.abs(sketch.signs.sum(axis=1)) < 5 * np.sqrt(size))
    halves = sketch.columns >= columns / 2
    if columns % 2 == 0:
        assert np.all(np.abs(halves.sum(axis=1) - size / 2) < 5 * np.sqrt(size) / 2)
    # Rows differ, and so do seeds.
    assert 0.4 < np.mean(sketch.signs[0] == sketch.signs[1]) < 0.6
    assert 0.4 < np.mean(sketch.signs[0] == CountSketch(1, columns, 6, np.arange(size)).signs[0]) < 0.6


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_a_sketch_of_one_number_gives_it_back(rows: int) -> None:
    sketch = CountSketch(rows, 50, 3, np.arange(10))
    values = np.zeros(10)
    values[7] = -3.0
    assert sketch.estimate(sketch.table(values))[7] == -3.0


def test_an_estimate_is_the_median_and_of_an_even_number_the_mean_of_the_middle_two() -> None:
    for rows, expected in ((3, 2.0), (4, 3.0)):
        sketch = CountSketch(rows, 1, 0, np.arange(2))
        table = sketch.signs[:, :1] * np.array([[1.0], [100.0], [2.0], [4.0]])[:rows]
        assert sketch.estimate(table)[0] == expected


# SketchedAMSGrad -----------------------------------------------------------------------------------------------------


def falling(step: int) -> float:
    """With a stop, and a restart."""
    return 0.0 if step in (1, 9, 10) else 0.1 / step if step < 15 else 0.2


def dense_rule(workers: int, steps: int, ratios: dict[int, float]) -> list[np.ndarray]:
    """Everything is picked whose parameter has a gradient, unless the learning rate is 0: no sketch."""
    xs, result = starting_values(), []
    eps = float(np.float32(1e-8))
    for index, x in enumerate(xs):
        m, e, v, peak = np.zeros((workers, *x.shape)), np.zeros((workers, *x.shape)), eps, eps
        moved = False
        for step in range(1, steps + 1):
            of_workers = [of_worker[index] for of_worker in partly_absent_at(step, workers)]
            g = np.stack([np.zeros(x.shape) if g is None else g for g in of_workers])
            m = 0.9 * m + 0.1 * g
            p = m + ratios[step] * e
            e = p
            if falling(step) and any(g is not None for g in of_workers):
                v = 0.99 * v + 0.01 * g.mean(axis=0) ** 2
                peak = np.maximum(peak, v)
                x = (1 - falling(step) * 0.2 if moved else 1) * x - falling(step) * p.mean(axis=0) / np.sqrt(peak)
                moved, e = True, np.zeros_like(p)
        result.append(x)
    return result


@pytest.mark.parametrize(("workers", "compressed"), [(3, True), (1, True), (1, False)])
def test_picking_everything_is_the_rule_without_a_sketch(workers: int, compressed: bool) -> None:
    oracle = sketched(workers, k=10**6, rows=1, columns=2, compressed=compressed)
    # The first that counts is that of step 2; those of 3 to 8 and of 12 to 14 are 0.1 / step.
    ratios = dict.fromkeys(range(1, 21), 1.0)
    ratios |= {step: step / (step - 1) for step in (3, 4, 5, 6, 7, 8, 12, 13, 14)}
    ratios |= {11: 11 / 8, 15: 0.1 / 14 / 0.2}
    for step in range(1, 21):
        oracle.groups[0].lr = falling(step)
        assert oracle.step(partly_absent_at(step, workers)).exchange == ("sketch" if compressed else "dense")
    dense = dense_rule(workers, 20, ratios)
    for value, expected in zip(oracle.values, dense, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compressed", [True, False])
def test_nothing_is_lost_between_what_is_put_in_and_what_is_said_or_kept(compressed: bool) -> None:
    oracle = sketched(3 if compressed else 1, compressed=compressed)
    workers = oracle.space.workers
    lr_before = 0.1
    for step in range(1, 21):
        lr = oracle.groups[0].lr = 0.1 * 0.9**step
        m, e = oracle.m, oracle.e
        gradients = partly_absent_at(step, workers)
        oracle.step(gradients)
        m = 0.9 * m + (1 - 0.9) * np.stack([joined(of_worker) for of_worker in gradients])
        p = m + (lr_before / lr if step > 1 else 1.0) * e
        np.testing.assert_allclose(oracle.m, m, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(oracle.p, p, rtol=1e-12, atol=1e-15)
        assert oracle.picked.sum() == (20 if compressed else sum(g.size for g in gradients[0] if g is not None))
        assert not oracle.e[:, oracle.picked].any()
        np.testing.assert_array_equal(oracle.e[:, ~oracle.picked], oracle.p[:, ~oracle.picked])
        said = np.where(oracle.picked, p.mean(axis=0), 0.0)
        np.testing.assert_allclose(said + oracle.e.mean(axis=0), p.mean(axis=0), rtol=1e-12, atol=1e-15)
        lr_before = lr


def test_a_step_moves_what_is_picked_and_decays_what_has_moved_before() -> None:
    oracle = sketched(2)
    moved_before = np.zeros(ELEMENTS, dtype=bool)
    for step in range(1, 15):
        x, peak = (np.concatenate(of, None) for of in (oracle.values, [p.peak for p in oracle.parameters]))
        v = np.concatenate([p.v for p in oracle.parameters])
        gradients = gradients_at(step, 2)
        oracle.step(gradients)
        picked = oracle.picked
        v = np.where(picked, 0.99 * v + (1 - 0.99) * mean_of(gradients) ** 2, v)
        peak = np.maximum(peak, v)
        expected = np.where(moved_before, (1 - 0.1 * 0.2) * x, x) - np.where(
            picked, 0.1 * oracle.p.mean(axis=0) / np.sqrt(peak), 0.0
        )
        np.testing.assert_allclose(np.concatenate(oracle.values, None), expected, rtol=1e-12)
        moved_before |= picked
    assert 20 < moved_before.sum() < ELEMENTS


def test_a_sketch_wide_enough_to_have_no_collisions_picks_the_largest() -> None:
    wide = sketched(1, rows=3, columns=1 << 20)
    assert len(np.unique(wide.sketch.columns[0])) == ELEMENTS
    for step in range(1, 20):
        peak = np.concatenate([p.peak for p in wide.parameters])
        wide.step(gradients_at(step, 1))
        assert wide.picked.sum() == 20
        keys = np.abs(wide.p[0]) / np.sqrt(peak)
        assert keys[wide.picked].min() >= keys[~wide.picked].max()


def test_equals_are_picked_from_the_first_of_the_flat_space_on() -> None:
    # The second parameter comes first.
    oracle = SketchedAMSGradOracle(
        [Group([np.zeros(3), np.zeros(4)], 0.1)], 1, bucket_elements=64, columns=1 << 20, k=3
    )
    oracle.step([[np.array([1.0, -1.0, 2.0]), np.array([0.0, -1.0, 1.0, 0.0])]])
    assert np.flatnonzero(oracle.picked).tolist() == [2, 4, 5]


def test_only_parameters_with_a_gradient_are_picked_from() -> None:
    oracle = sketched(2, k=100)
    oracle.step(gradients_at(1, 2))
    gradients = gradients_at(2, 2)
    for of_worker in gradients:
        of_worker[0] = of_worker[3] = None
    value = oracle.values[3]
    oracle.step(gradients)
    assert [int(part.sum()) for part in oracle.space.split(oracle.picked)] == [0, 70, 1, 0]
    np.testing.assert_array_equal(oracle.values[3], value)
    oracle.step([[None] * 4, [None] * 4])
    assert not oracle.picked.any()
    np.testing.assert_array_equal(oracle.e, oracle.p)


def test_a_bad_number_keeps_its_memories_and_all_others_absorb_the_step() -> None:
    oracle = sketched(2)
    for step in range(1, 6):
        oracle.step(gradients_at(step, 2))
    before = [(p.value, p.v, p.peak) for p in oracle.parameters]
    m, e = oracle.m, oracle.e
    oracle.groups[0].lr = 0.05
    assert oracle.step(spoilt(gradients_at(6, 2), np.nan)).stayed == [True, True]
    for p, (value, v, peak) in zip(oracle.parameters, before, strict=True):
        for now, then in ((p.value, value), (p.v, v), (p.peak, peak)):
            np.testing.assert_array_equal(now, then)
    absorbed = 0.9 * m + (1 - 0.9) * np.stack([joined(of_worker) for of_worker in gradients_at(6, 2)])
    absorbed[1, 5] = m[1, 5]
    kept = absorbed + 2 * e
    kept[1, 5] = e[1, 5]
    np.testing.assert_allclose(oracle.m, absorbed, rtol=1e-12)
    np.testing.assert_allclose(oracle.e, kept, rtol=1e-12)
    # The step's learning rate is the last one all the same.
    e = oracle.e
    oracle.step(gradients_at(7, 2))
    np.testing.assert_allclose(oracle.p, oracle.m + e, rtol=1e-12)


def test_an_error_that_grows_beyond_all_bounds_is_kept_as_it_was() -> None:
    oracle = sketched(1)
    oracle.step(gradients_at(1, 1))
    e = oracle.e
    oracle.groups[0].lr = 1e-22
    assert oracle.step(gradients_at(2, 1)).skipped
    np.testing.assert_array_equal(oracle.e[np.abs(e) > 2e-3], e[np.abs(e) > 2e-3])


def test_variances_begin_at_eps_as_float32() -> None:
    for p in sketched(1, eps=1e-6).parameters:
        assert set(p.v.tolist()) == set(p.peak.tolist()) == {float(np.float32(1e-6))}


# What holds for both, and every codec --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_what_never_had_a_gradient_rests(name: str) -> None:
    values = starting_values()
    oracle = EVERY[name](2)
    for step in range(1, 40):
        gradients = gradients_at(step, 2)
        for of_worker in gradients:
            assert of_worker[0] is not None
            of_worker[0][4] = 0
            of_worker[3] = None
        oracle.step(gradients)
        np.testing.assert_array_equal(oracle.values[0][4], values[0][4])
        np.testing.assert_array_equal(oracle.values[3], values[3])
    enough = 0.8 if "topk" in name else 1.0
    assert np.mean(oracle.values[0][:4] != values[0][:4]) >= enough
    assert np.mean(oracle.values[1] != values[1]) >= enough


@pytest.mark.parametrize("name", EVERY)
def test_nothing_moves_without_any_gradient(name: str) -> None:
    oracle = EVERY[name](2)
    oracle.step(gradients_at(1, 2))
    values = oracle.values
    assert not oracle.step([[None] * 4, [None] * 4]).skipped
    for now, then in zip(oracle.values, values, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize("name", EVERY)
def test_workers_have_no_order(name: str) -> None:
    some, others = EVERY[name](3), EVERY[name](3)
    for step in range(1, 12):
        gradients = partly_absent_at(step, 3)
        some.step(gradients)
        others.step(gradients[::-1])
        for ours, theirs in zip(some.values, others.values, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_maximize_is_descent_on_the_negated_gradient(name: str) -> None:
    up, down = EVERY[name](2, maximize=True), EVERY[name](2)
    for step in range(1, 7):
        gradients = gradients_at(step, 2)
        up.step(gradients)
        down.step([[-g for g in of_worker if g is not None] for of_worker in gradients])
    for ours, theirs in zip(up.values, down.values, strict=True):
        np.testing.assert_array_equal(ours, theirs)

"""What can be known without the product about the oracles that exchange numbers and scaled signs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles.flat_space import FlatSpace, Group, ScaledSigns, first_words
from tests.oracles.lamb import LambOracle
from tests.oracles.onebit_adam import OneBitAdamOracle, WarmUp
from tests.oracles.onebit_lamb import OneBitLambOracle
from tests.oracles.zero_one_adam import ZeroOneAdamOracle

SHAPES = ((13, 7), (70,), (), (3, 50))
Gradients = list[list[np.ndarray | None]]


def starting_values() -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [np.asarray(generator.standard_normal(shape)) for shape in SHAPES]


def gradients_at(step: int, workers: int) -> Gradients:
    generator = np.random.default_rng((2, step))
    return [[np.asarray(generator.standard_normal(shape)) for shape in SHAPES] for _ in range(workers)]


def zero_one(groups: Sequence[Group], workers: int, **options: Any) -> ZeroOneAdamOracle:
    defaults = {"bucket_elements": 128, "var_freeze_step": 5, "var_update_scaler": 2, "local_step_scaler": 4}
    return ZeroOneAdamOracle(groups, workers, **{**defaults, **options})


def all_values(oracle: Any) -> list[np.ndarray]:
    """All replicas', for comparisons that hold for every one."""
    return [p.value.copy() for p in oracle.parameters]


# The flat space ------------------------------------------------------------------------------------------------------


def test_shards_are_cut_as_the_page_says() -> None:
    # 5 words in buckets of 128 elements for 2 workers: a word a shard, and the last bucket's second is padding.
    assert first_words(5, 2, 128) == [0, 1, 2, 3, 4, 5]
    # A bucket that is not full has shorter shards; all shards of a bucket are as long as each other.
    assert first_words(5, 2, 1000) == [0, 3]
    assert first_words(5, 4, 1000) == [0, 2, 4, 6]
    assert first_words(20, 2, 6 * 64) == [0, 3, 6, 9, 12, 15, 18, 19]
    assert first_words(3, 2, 1) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("workers", "slices", "expected"),
    [(2, 1, [1] * 100 + [0] * 70 + [0]), (2, 2, [1] * 64 + [2] * 36 + [0] * 64 + [1] * 6 + [0])],
)
def test_elements_find_their_shard_from_the_last_parameter_on(workers: int, slices: int, expected: list[int]) -> None:
    # Words: 0 has the scalar, 1 and 2 the 70 elements, 3 and 4 the 100.
    space = FlatSpace(
        [Group([np.zeros((10, 10)), np.zeros(70)], 1.0), Group([np.zeros(())], 1.0)], workers, slices, 1000
    )
    assert [place.elements[0] for place in space.places] == [192, 64, 0]
    assert space.shard_of.tolist() == expected


# Scaled signs --------------------------------------------------------------------------------------------------------


def test_nothing_is_lost_between_what_is_put_in_and_what_comes_out() -> None:
    workers = 3
    space = FlatSpace([Group(starting_values(), 1.0)], workers, 2, 200)
    signs = ScaledSigns(space)
    put_in, came_out = 0.0, 0.0
    for step in range(20):
        inputs = np.random.default_rng((3, step)).standard_normal((workers, space.shard_of.size))
        c, unfit = signs.add(inputs, np.zeros_like(inputs))
        came_out = came_out + signs.exchange(c)
        put_in = put_in + inputs.mean(axis=0)
        remains = signs.worker_errors.mean(axis=0) + signs.owner_errors
        assert unfit == [False] * workers
        np.testing.assert_allclose(came_out + remains, put_in, rtol=0, atol=1e-12)


def test_a_shard_has_one_scale_and_padding_has_no_part_in_it() -> None:
    # 70 elements are two words: the shard of the second has 6 elements, and the first parameter's shards are others.
    space = FlatSpace([Group([np.zeros(3), np.zeros(70)], 1.0)], 1, 1, 64)
    signs = ScaledSigns(space)
    inputs = np.concatenate([[3.0, -4.0, 0.0], np.full(64, -2.0), [1, -5, 1, 1, 2, 2]])[None]
    answer = signs.exchange(signs.add(inputs, np.zeros_like(inputs))[0])
    np.testing.assert_allclose(signs.worker_scales, [[2.0, np.sqrt(6), 5 / np.sqrt(3)]], rtol=1e-7)
    np.testing.assert_allclose(answer[:3], np.array([1, -1, 1]) * 5 / np.sqrt(3), rtol=1e-7)
    np.testing.assert_array_equal(answer[3:67], -2.0)
    np.testing.assert_allclose(answer[67:], np.array([1, -1, 1, 1, 1, 1]) * np.sqrt(6), rtol=1e-7)


def test_what_is_no_fit_number_is_sent_without_its_gradient() -> None:
    space = FlatSpace([Group([np.zeros(5)], 1.0)], 2, 1, 64)
    inputs = np.array([[np.nan, np.inf, -(2.0**60), 2.0**59, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    c, unfit = ScaledSigns(space).add(inputs, np.full(5, 7.0))
    assert unfit == [True, False]
    assert c.tolist() == [[7.0, 7.0, 7.0, 2.0**59, 1.0], [1.0] * 5]


# Dense steps ---------------------------------------------------------------------------------------------------------

Factory = Callable[..., Any]
DENSE: dict[str, Factory] = {
    "1-bit Adam": lambda groups, n: OneBitAdamOracle(groups, n, bucket_elements=128, warmup_steps=100),
    "1-bit Adam, single node": lambda groups, n: OneBitAdamOracle(
        groups, n, bucket_elements=128, warmup_steps=2, compressed=False
    ),
    "0/1 Adam": lambda groups, n: ZeroOneAdamOracle(
        groups, n, bucket_elements=128, var_freeze_step=100, local_step_scaler=1
    ),
    "0/1 Adam, single node": lambda groups, n: ZeroOneAdamOracle(
        groups, n, bucket_elements=128, var_freeze_step=2, local_step_scaler=1, compressed=False
    ),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_steps_are_torchs_adamw_on_the_mean_gradient(name: str) -> None:
    workers = 1 if "single" in name else 3
    values = starting_values()
    groups = [Group(values[:2], 0.1, 0.1, (0.8, 0.9)), Group(values[2:], 0.05)]
    oracle = DENSE[name](groups, workers)
    tensors = [torch.nn.Parameter(torch.tensor(value)) for value in values]
    adamw = torch.optim.AdamW(
        [
            {"params": tensors[:2], "lr": 0.1, "weight_decay": 0.1, "betas": (0.8, 0.9)},
            {"params": tensors[2:], "lr": 0.05, "weight_decay": 0.0},
        ]
    )
    for step in range(1, 13):
        for ours, theirs in zip(groups, adamw.param_groups, strict=True):
            ours.lr = theirs["lr"] = 0.1 / step
        gradients = gradients_at(step, workers)
        for worker in range(workers):
            if step % 3 == 0 or (worker == 0 and step == 4):
                gradients[worker][1] = None
        for index, tensor in enumerate(tensors):
            present = [g for g in (of_worker[index] for of_worker in gradients) if g is not None]
            tensor.grad = torch.tensor(np.sum(present, axis=0) / workers) if present else None
        outcome = oracle.step(gradients)
        adamw.step()
        assert outcome.exchange == "dense"
        assert not outcome.skipped
        for value, tensor in zip(oracle.values, tensors, strict=True):
            np.testing.assert_allclose(value, tensor.detach().numpy(), rtol=1e-12, atol=1e-12, err_msg=f"step {step}")


def test_maximize_is_descent_on_the_negated_gradient() -> None:
    up, down = (
        OneBitAdamOracle([Group(starting_values(), 0.1)], 2, bucket_elements=128, warmup_steps=3, maximize=maximize)
        for maximize in (True, False)
    )
    for step in range(1, 7):
        gradients = gradients_at(step, 2)
        up.step(gradients)
        down.step([[-g for g in of_worker if g is not None] for of_worker in gradients])
    np.testing.assert_array_equal(up.values[0], down.values[0])


# 1-bit Adam ----------------------------------------------------------------------------------------------------------


def test_a_compressed_step_worked_by_hand() -> None:
    """One shard of three elements. All numbers were worked out on paper, and chosen so that the scales are whole."""
    groups = [Group([np.ones(3)], lr=0.5, weight_decay=0.1)]
    oracle = OneBitAdamOracle(groups, 2, bucket_elements=64, warmup_steps=1, betas=(0.5, 0.75), eps=0.0)
    (p,) = oracle.parameters
    first = np.array([4.0, -8.0, 0.0])
    oracle.step([[first], [first]])
    # v / (1 - 0.75) is the square of the first gradient, and m / (1 - 0.5) the gradient: x moves by its sign.
    np.testing.assert_allclose(p.value, [0.95 - 0.5, 0.95 + 0.5, 1.0], rtol=1e-15)
    assert p.m.tolist() == [2.0, -4.0, 0.0]
    assert p.P.tolist() == [1 / 4, 1 / 8, 0.0]
    assert oracle.frozen

    oracle.step([[np.array([2.0, -16.0, 4.0])], [np.array([20.0, 26.0, -2.0])]])
    assert oracle.signs.c.tolist() == [[2.0, -10.0, 2.0], [11.0, 11.0, -1.0]]
    assert oracle.signs.worker_scales.tolist() == [[6.0, 0.0], [9.0, 0.0]]
    assert oracle.signs.worker_errors.tolist() == [[-4.0, -4.0, -4.0], [2.0, 2.0, 8.0]]
    assert oracle.signs.y.tolist() == [7.5, 1.5, -1.5]
    assert oracle.signs.owner_scales.tolist() == [4.5, 0.0]
    assert oracle.signs.owner_errors.tolist() == [3.0, -3.0, 3.0]
    assert p.m.tolist() == [4.5, 4.5, -4.5]
    # 0.5 / (1 - 0.5^2) * 4.5 * P; the third element had no gradient before the freeze.
    after = [0.95 * 0.45 - 0.75, 0.95 * 1.45 - 0.375, 1.0]
    np.testing.assert_allclose(p.value, after, rtol=1e-14)

    # Without a gradient anywhere the momentum is exchanged with the errors of the step before, and nothing moves.
    assert not oracle.step([[None], [None]]).skipped
    assert oracle.signs.c.tolist() == [[-1.75, -1.75, -6.25], [4.25, 4.25, 5.75]]
    s = [float(np.float32(math.sqrt(np.mean(np.square(c))))) for c in oracle.signs.c]
    y = (s[1] - s[0]) / 2 + np.array([3.0, -3.0, 3.0])
    np.testing.assert_allclose(oracle.signs.y, y, rtol=1e-12)
    np.testing.assert_allclose(p.m, np.sqrt(np.mean(y**2)) * np.array([1, -1, 1]), rtol=1e-7)
    np.testing.assert_allclose(p.value, after, rtol=1e-14)


def test_warm_up_ends_by_itself_when_v_falls_no_more() -> None:
    # beta2 = 0.9: a window of 10 steps, a check in each. 0.99^4 >= 0.96 > 0.99^5, and from step 40 on v is steady.
    warm_up = WarmUp("auto", [Group([np.zeros(1)], 1.0)], 0.9)
    assert [t for t in range(1, 61) if warm_up.ends_with(t, 0.99 ** min(t, 40) * (1 - 0.9**t))] == list(range(52, 61))


def test_warm_up_lasts_as_long_as_a_learning_rate_rises_and_gradients_are_missing() -> None:
    # beta2 = 0.99: a window of 100, a check at multiples of 7, against 112 steps before: 119 is the first, and 231 the
    # first that is a window after step 126.
    groups = [Group([np.zeros(1)], 1.0), Group([np.zeros(1)], 0.0)]
    assert first_end(WarmUp("auto", groups, 0.99), lambda _: 1.0) == 119

    def rising_until_126(step: int) -> float:
        groups[1].lr = min(step, 126) / 126
        return 1.0

    assert first_end(WarmUp("auto", groups, 0.99), rising_until_126) == 231
    assert first_end(WarmUp("auto", groups, 0.99), lambda step: 1.0 if step >= 30 else 0.0) == 35 + 112


def first_end(warm_up: WarmUp, sum_of_v: Callable[[int], float]) -> int:
    return next(t for t in range(1, 1000) if warm_up.ends_with(t, sum_of_v(t) * (1 - 0.99**t)))


def test_auto_warm_up_freezes_the_oracle() -> None:
    for oracle in (
        OneBitAdamOracle(
            [Group(starting_values(), 0.01)], 2, bucket_elements=128, warmup_steps="auto", betas=(0.9, 0.9)
        ),
        OneBitLambOracle(
            [Group(starting_values(), 0.01)], 2, bucket_elements=128, warmup_steps="auto", betas=(0.9, 0.9)
        ),
    ):
        exchanges = [oracle.step(gradients_at(step, 2)).exchange for step in range(1, 20)]
        assert exchanges == ["dense"] * 17 + ["signs"] * 2


# What holds for all of them ------------------------------------------------------------------------------------------

EVERY: dict[str, Factory] = {
    "1-bit Adam": lambda groups, n: OneBitAdamOracle(groups, n, bucket_elements=128, warmup_steps=4),
    "0/1 Adam": zero_one,
    "LAMB": lambda groups, n: LambOracle(groups, n, bucket_elements=128),
    "1-bit LAMB": lambda groups, n: OneBitLambOracle(groups, n, bucket_elements=128, warmup_steps=4),
}


@pytest.mark.parametrize("name", EVERY)
def test_what_never_had_a_gradient_rests(name: str) -> None:
    values = starting_values()
    oracle = EVERY[name]([Group(values, 0.1, 0.2)], 2)
    for step in range(1, 20):
        gradients = gradients_at(step, 2)
        for of_worker in gradients:
            assert of_worker[0] is not None
            of_worker[0][4] = 0
            of_worker[3] = None
        oracle.step(gradients)
        for replica in getattr(oracle, "replicas", None) or [oracle.values]:
            np.testing.assert_array_equal(replica[0][4], values[0][4])
            np.testing.assert_array_equal(replica[3], values[3])
            assert np.all(replica[0][:4] != values[0][:4])


@pytest.mark.parametrize("name", [name for name in EVERY if name != "LAMB"])
def test_what_had_no_gradient_before_the_freeze_rests_for_good(name: str) -> None:
    values = starting_values()
    oracle = EVERY[name]([Group(values, 0.1, 0.2)], 2)
    for step in range(1, 20):
        gradients = gradients_at(step, 2)
        for of_worker in gradients:
            if step <= 5:
                of_worker[0] = of_worker[3] = None
            elif step > 10:
                of_worker[3] = None
        oracle.step(gradients)
    for index, p in enumerate(oracle.parameters):
        same = np.equal(p.value, values[index])
        assert same.all() if index in (0, 3) else not same.any()


@pytest.mark.parametrize("name", EVERY)
def test_a_dense_step_with_a_bad_number_changes_nothing_but_the_step_number(name: str) -> None:
    oracle = EVERY[name]([Group(starting_values(), 0.1, 0.2)], 2)
    oracle.step(gradients_at(1, 2))
    before = [(p.value.copy(), p.m.copy(), p.v.copy(), p.updates) for p in oracle.parameters]
    gradients = gradients_at(2, 2)
    assert gradients[1][1] is not None
    gradients[1][1][3] = np.inf
    outcome = oracle.step(gradients)
    assert (outcome.exchange, outcome.skipped, oracle.step_number) == ("dense", True, 2)
    for p, (value, m, v, updates) in zip(oracle.parameters, before, strict=True):
        assert updates == p.updates
        for now, then in ((p.value, value), (p.m, m), (p.v, v)):
            np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize("name", ["1-bit Adam", "1-bit LAMB"])
def test_a_compressed_step_with_a_bad_number_runs_its_course_and_moves_nothing(name: str) -> None:
    bad, zero = (EVERY[name]([Group(starting_values(), 0.1, 0.2)], 2) for _ in range(2))
    for step in range(1, 9):
        for oracle, number in ((bad, np.nan), (zero, 0.0)):
            before = all_values(oracle)
            gradients = gradients_at(step, 2)
            if step == 7:
                assert gradients[1][1] is not None
                gradients[1][1][3] = number
            outcome = oracle.step(gradients)
            assert outcome.skipped == (step == 7 and oracle is bad)
            if outcome.skipped:
                for now, then in zip(all_values(oracle), before, strict=True):
                    np.testing.assert_array_equal(now, then)
        for p, q in zip(bad.parameters, zero.parameters, strict=True):
            np.testing.assert_array_equal(p.m, q.m)
            assert np.array_equal(p.value, q.value) == (step < 7)

"""What can be known without the product about the oracle of CD-Adam."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.oracles.cd_adam import CDAdamOracle
from tests.oracles.flat_space import FlatSpace, Group, cut
from tests.unit.amsgrad_cases import (
    ELEMENTS,
    MARKOV,
    SHAPES,
    cd_adam,
    gradients_at,
    joined,
    mean_of,
    partly_absent_at,
    spoilt,
    starting_values,
)

# The flat space ------------------------------------------------------------------------------------------------------


def test_lengths_of_shards_count_padding() -> None:
    # 70 elements are two words, and the scalar one: with two workers and buckets of two words the last shard is empty.
    assert cut(3, 2, 128) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert cut(7, 2, 5 * 64) == [(0, 3), (3, 3), (6, 1), (7, 1)]
    space = FlatSpace([Group([np.zeros(70), np.zeros(())], 1.0)], 2, 1, 1000)
    assert space.shard_lengths == [128, 128]
    assert space.elements.tolist() == [*range(64, 134), 0]


# CD-Adam -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["all of the elements", "a single node"])
def test_what_is_said_in_full_is_torchs_amsgrad_on_the_mean_gradient(case: str) -> None:
    workers = 1 if case == "a single node" else 3
    options: dict[str, Any] = {"compressed": False} if case == "a single node" else {"codec": "topk", "ratio": 1.0}
    values = starting_values()
    groups = [Group(values[:2], 0.1, 0.1, (0.8, 0.9)), Group(values[2:], 0.05)]
    oracle = CDAdamOracle(groups, workers, bucket_elements=128, betas=(0.9, 0.99), **options)
    tensors = [torch.nn.Parameter(torch.tensor(value)) for value in values]
    adamw = torch.optim.AdamW(
        [
            {"params": tensors[:2], "lr": 0.1, "weight_decay": 0.1, "betas": (0.8, 0.9)},
            {"params": tensors[2:], "lr": 0.05, "weight_decay": 0.0, "betas": (0.9, 0.99)},
        ],
        amsgrad=True,
    )
    for step in range(1, 31):
        for ours, theirs in zip(groups, adamw.param_groups, strict=True):
            ours.lr = theirs["lr"] = 0.1 / step
        gradients = partly_absent_at(step, workers)
        for index, tensor in enumerate(tensors):
            present = [g for g in (of_worker[index] for of_worker in gradients) if g is not None]
            tensor.grad = torch.tensor(np.sum(present, axis=0) / workers) if present else None
        assert oracle.step(gradients).exchange == ("dense" if case == "a single node" else "topk")
        adamw.step()
        np.testing.assert_allclose(oracle.g, mean_of(gradients), rtol=0, atol=1e-12)
        for value, tensor in zip(oracle.values, tensors, strict=True):
            np.testing.assert_allclose(value, tensor.detach().numpy(), rtol=1e-6, atol=1e-6, err_msg=f"step {step}")


def test_the_first_steps_worked_by_hand() -> None:
    """One shard, in which the fourth element has no gradient until step 2. All numbers were worked out on paper."""
    groups = [Group([np.ones(4)], lr=0.5, weight_decay=0.1)]
    oracle = CDAdamOracle(groups, 2, bucket_elements=64, betas=(0.5, 0.75), eps=0.0)
    (p,) = oracle.parameters
    outcome = oracle.step([[np.array([4.0, -8.0, 0.0, 0.0])], [np.array([0.0, 4.0, 2.0, 0.0])]])
    assert (outcome.exchange, outcome.skipped) == ("signs", False)
    assert oracle.alive.tolist() == [True, True, True, False]
    # Scales: 12/3, 6/3, and (3 + 1 + 3)/3.
    assert oracle.known.tolist() == [[4.0, -4.0, 4.0, 0.0], [2.0, 2.0, 2.0, 0.0]]
    assert oracle.mean.tolist() == [3.0, -1.0, 3.0, 0.0]
    s = float(np.float32(7 / 3))
    assert oracle.g.tolist() == [s, -s, s, 0.0]
    # Bias corrections make both moments those of this gradient, so x moves by its sign; the fourth does not even decay.
    np.testing.assert_allclose(p.value, [0.95 - 0.5, 0.95 + 0.5, 0.95 - 0.5, 1.0], rtol=1e-14)
    # What was not said: (0, -4, -4) of (4, -8, 0), and (-2, 2, 0) of (0, 4, 2).
    np.testing.assert_allclose(oracle.contraction, [[32 / 80, 8 / 20]], rtol=1e-14)

    # The fourth element says hello; it is no part of scales, (0 + 4 + 4)/3 and (2 + 2 + 0)/3, nor of what is known.
    oracle.step([[np.array([4.0, -8.0, 0.0, 7.0])], [np.array([0.0, 4.0, 2.0, 0.0])]])
    first, second = (float(np.float32(sum_of_c / 3)) for sum_of_c in (8, 4))
    known = [[4 + first, -4 - first, 4 - first, 0.0], [2 - second, 2 + second, 2 + second, 0.0]]
    np.testing.assert_allclose(oracle.known, known, rtol=1e-15)
    assert oracle.alive.tolist() == [True, True, True, True]
    assert oracle.g[3] == 0
    assert p.value[3] == 1.0

    # sign(0) = +: the fourth element has c = 7 and 0, and its shard's scales count four.
    before = oracle.known
    oracle.step([[np.array([4.0, -8.0, 0.0, 7.0])], [np.array([0.0, 4.0, 2.0, 0.0])]])
    c = np.array([[4.0, -8.0, 0.0, 7.0], [0.0, 4.0, 2.0, 0.0]]) - before
    said = np.abs(c).mean(axis=1, keepdims=True) * np.where(c >= 0, 1, -1)
    np.testing.assert_allclose(oracle.known, before + said, rtol=1e-6, atol=1e-6)
    assert oracle.known[0, 3] > 0
    assert oracle.known[1, 3] > 0
    assert p.value[3] != 1.0


def test_top_k_counts_padding_in_k_and_gives_ties_to_the_first_in_the_flat_space() -> None:
    # The second parameter comes first. All is one shard of two words, of which 1/32 is 4 elements.
    oracle = CDAdamOracle([Group([np.zeros(3), np.zeros(5)], 0.1)], 1, bucket_elements=1000, codec="topk", ratio=1 / 32)
    oracle.step([[np.array([2.0, 2.0, 3.0]), np.array([1.0, -2.0, 1.0, 2.0, 0.0])]])
    assert oracle.known.tolist() == [[2.0, 0.0, 3.0, 0.0, -2.0, 0.0, 2.0, 0.0]]
    assert oracle.g.tolist() == oracle.known[0].tolist()
    np.testing.assert_allclose(oracle.contraction, [[6 / 27]])


def test_compressing_momentum_is_compressing_the_average_of_gradients() -> None:
    """Worker 0 has no gradient for parameter 1 in even steps: its average stays, and takes part."""
    averages = [np.zeros(ELEMENTS) for _ in range(2)]
    momentum, gradient = cd_adam(2, compress="momentum"), cd_adam(2)
    splits = np.cumsum([math.prod(shape) for shape in SHAPES])[:-1]
    for step in range(1, 10):
        gradients = partly_absent_at(step, 2)
        for worker, of_worker in enumerate(gradients):
            given = np.concatenate(
                [np.full(shape, g is not None) for g, shape in zip(of_worker, SHAPES, strict=True)], None
            )
            average = 0.9 * averages[worker] + (1 - 0.9) * joined(of_worker)
            averages[worker] = np.where(given, average, averages[worker])
        momentum.step(gradients)
        gradient.step([[a.reshape(s) for a, s in zip(np.split(of, splits), SHAPES, strict=True)] for of in averages])
        np.testing.assert_allclose(momentum.momenta, averages, rtol=1e-12)
        np.testing.assert_allclose(momentum.g, gradient.g, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", MARKOV)
def test_the_owners_know_the_mean_of_what_workers_have_said(name: str) -> None:
    oracle = MARKOV[name](3)
    for step in range(1, 30):
        gradients = partly_absent_at(step, 3)
        skipped = oracle.step(spoilt(gradients, np.nan) if step in (1, 7) else gradients).skipped
        assert skipped == (step in (1, 7))
        np.testing.assert_allclose(oracle.mean, oracle.known.mean(axis=0), rtol=0, atol=1e-12)
        assert np.all(oracle.contraction[-1] < 1)
    assert np.mean(oracle.g != 0) > 0.5
    assert len(oracle.contraction) == 29


@pytest.mark.parametrize("name", MARKOV)
def test_what_all_know_approaches_a_gradient_that_stays(name: str) -> None:
    oracle = MARKOV[name](3)
    gradients = gradients_at(1, 3)
    for _ in range(200):
        oracle.step(gradients)
    mean = mean_of(gradients)
    assert np.linalg.norm(oracle.g - mean) < (1e-3 if "sign" in name else 1e-6) * np.linalg.norm(mean)


@pytest.mark.parametrize("name", MARKOV)
def test_two_workers_who_agree_are_one_of_two_slices(name: str) -> None:
    # Either way a bucket has two shards.
    two, one = MARKOV[name](2), MARKOV[name](1, slices=2)
    for step in range(1, 10):
        (gradients,) = partly_absent_at(step, 1)
        two.step([gradients, gradients])
        one.step([gradients])
        for ours, theirs in zip(two.values, one.values, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10)


def test_shards_make_a_difference_to_scales() -> None:
    few, many = cd_adam(2, bucket_elements=1000), cd_adam(2, slices=2, bucket_elements=1000)
    for oracle in (few, many):
        oracle.step(gradients_at(1, 2))
    assert not np.array_equal(np.abs(few.g), np.abs(many.g))


@pytest.mark.parametrize("number", [np.nan, np.inf, -(2.0**60)])
@pytest.mark.parametrize("name", MARKOV)
def test_a_bad_number_says_what_was_said_before_and_nothing_moves(name: str, number: float) -> None:
    oracle = MARKOV[name](2)
    for step in range(1, 6):
        oracle.step(gradients_at(step, 2))
    before = [(p.value, p.m, p.v, p.peak, p.updates) for p in oracle.parameters]
    g, known, momenta = oracle.g, oracle.known, oracle.momenta
    scale = 20.0 if "momentum" in name else 1.0
    outcome = oracle.step(spoilt(gradients_at(6, 2), scale * number))
    assert outcome.stayed == [True, True]
    for p, (value, m, v, peak, updates) in zip(oracle.parameters, before, strict=True):
        assert p.updates == updates
        for now, then in ((p.value, value), (p.m, m), (p.v, v), (p.peak, peak)):
            np.testing.assert_array_equal(now, then)
    assert np.isfinite(oracle.known).all()
    assert np.mean(oracle.g != g) > (0.05 if "topk" in name else 0.99)
    if "momentum" in name:
        unchanged = oracle.momenta == momenta
        assert np.argwhere(unchanged).tolist() == [[1, 5]]
    elif name == "topk":
        assert oracle.known[1, 5] == known[1, 5]
    else:
        # c = 0, whose sign is +, and it counts in the shard's scale: parameter 0's first word is a shard.
        space = oracle.space
        shard = space.shard_of == space.shard_of[5]
        c = joined(gradients_at(6, 2)[1])[shard] - known[1][shard]
        c[5] = 0.0
        np.testing.assert_allclose(oracle.known[1, 5], known[1, 5] + np.abs(c).mean(), rtol=1e-6)
    oracle.step(gradients_at(7, 2))
    for p, (value, *_) in zip(oracle.parameters, before, strict=True):
        assert np.mean(p.value != value) > (0.3 if "topk" in name else 0.99)


@pytest.mark.parametrize("compress", ["gradient", "momentum"])
def test_of_a_first_step_that_is_skipped_only_the_greeting_is_heard(compress: Literal["gradient", "momentum"]) -> None:
    oracle = CDAdamOracle([Group([np.ones(4)], 0.1)], 2, bucket_elements=64, compress=compress)
    gradients = [[np.array([1.0, 0.0, np.nan, 0.0])], [np.array([0.0, 2.0, 0.0, 0.0])]]
    assert oracle.step(gradients).skipped
    assert oracle.alive.tolist() == [True, True, False, False]
    assert not oracle.known.any()
    assert not oracle.g.any()
    assert oracle.values[0].tolist() == [1.0] * 4
    # In a later step a dead element with a bad gradient says no hello either; another is heard though all is skipped.
    assert oracle.step([[np.array([1.0, 0.0, np.inf, 0.0])], [np.array([0.0, 0.0, 0.0, 1.0])]]).skipped
    assert oracle.alive.tolist() == [True, True, False, True]
    assert oracle.known[:, 2:].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert not oracle.step([[np.array([1.0, 0.0, 1.0, 0.0])], [np.array([0.0, 0.0, 0.0, 0.0])]]).skipped
    assert oracle.alive.all()
    assert (oracle.values[0] == 1.0).tolist() == [False, False, True, False]

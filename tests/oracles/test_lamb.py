"""The oracles of LAMB and 1-bit LAMB, against loops that are written once more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.oracles.flat_space import Group
from tests.oracles.lamb import LambOracle
from tests.oracles.onebit_lamb import OneBitLambOracle, OneBitLambParameter
from tests.oracles.test_flat_space import gradients_at, starting_values


def lamb_by_itself(x: np.ndarray, gradients: Sequence[np.ndarray], lr: float, decay: float) -> np.ndarray:
    m, v = np.zeros_like(x), np.zeros_like(x)
    for k, g in enumerate(gradients, start=1):
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        r = m / (1 - 0.9**k) / (np.sqrt(v / (1 - 0.999**k)) + 1e-6) + decay * x
        r[v == 0] = 0
        c = np.sqrt((x * x).sum()) / np.sqrt((r * r).sum()) if x.any() and r.any() else 1.0
        x = x - lr * np.clip(c, 0.01, 10) * r
    return x


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("warm_up_of_onebit", [True, False])
def test_lamb_is_a_loop_of_ten_lines(compressed: bool, warm_up_of_onebit: bool) -> None:
    workers = 2 if compressed else 1
    # Zeros have a norm of 0; 1e-3 and 1e3 times the values meet the limits of the coefficient.
    values = [starting_values()[0], np.zeros(5), 1e-3 * starting_values()[1], 1e3 * starting_values()[3]]
    groups = [Group(values[:2], 0.1, 0.3), Group(values[2:], 0.01)]
    options: dict[str, Any] = {"bucket_elements": 128, "compressed": compressed}
    if warm_up_of_onebit:
        oracle = OneBitLambOracle(groups, workers, warmup_steps=100 if compressed else 2, **options)
    else:
        oracle = LambOracle(groups, workers, **options)
    generator = np.random.default_rng(4)
    steps = [[[generator.standard_normal(v.shape) for v in values] for _ in range(workers)] for _ in range(8)]
    for gradients in steps:
        gradients[0][0][3] = gradients[-1][0][3] = 0
        assert oracle.step(gradients).exchange == "dense"
    for index, start in enumerate(values):
        means = [np.mean([of_worker[index] for of_worker in gradients], axis=0) for gradients in steps]
        lr, decay = (0.1, 0.3) if index < 2 else (0.01, 0.0)
        np.testing.assert_allclose(
            oracle.values[index], lamb_by_itself(start, means, lr, decay), rtol=1e-12, atol=1e-15
        )
    assert [p.coefficient for p in oracle.parameters[2:]] == [0.01, 10.0]


def test_onebit_lamb_of_layers_of_one_element() -> None:
    """With a shard to each of them the exchange is exact, and the whole rule a loop over scalars."""
    beta1, beta2, eps, lr, decay, warm_up = 0.8, 0.9, 1e-3, 0.05, 0.3, 4
    starts, scales = (2.0, -0.5), (1.0, 20.0)
    groups = [Group([np.array([x]) for x in starts], lr, decay)]
    oracle = OneBitLambOracle(groups, 1, bucket_elements=64, warmup_steps=warm_up, betas=(beta1, beta2), eps=eps)
    series = np.random.default_rng(6).standard_normal((20, 2)) * scales * np.linspace(1, 0.2, 20)[:, None]
    factors = []
    x, m, v, w, c_avg, f = np.array(starts), np.zeros(2), np.zeros(2), np.zeros(2), np.zeros(2), np.ones(2)
    frozen = np.ones(2)
    for k, g in enumerate(series, start=1):
        oracle.step([[np.array([g[0]]), np.array([g[1]])]])
        m = beta1 * m + (1 - beta1) * g
        d = m / (1 - beta1**k)
        if k <= warm_up:
            v = beta2 * v + (1 - beta2) * g * g
            w = v / (1 - beta2**k)
            r = d / (np.sqrt(w) + eps) + decay * x
            c = np.clip(np.abs(x) / np.abs(r), 0.01, 10)
            c_avg = 0.9 * c_avg + 0.1 * c
            x = x - lr * c * r
            frozen = np.sqrt(w) + eps
        else:
            if k > warm_up + 1:
                w = beta2 * w + (1 - beta2) * g * g
            d = d / frozen
            r = d + decay * x
            p = np.minimum(1, np.abs(d) / np.abs(r))
            f = np.clip(np.clip(p * frozen / (np.sqrt(w) + eps) + 1 - p, 0.5, 4), 0.9 * f, 1.1 * f)
            x = x - lr * c_avg / (1 - 0.9**warm_up) * f * r
            factors.append(f)
            np.testing.assert_allclose([q.factor for q in oracle.parameters], f, rtol=1e-5, err_msg=f"step {k}")
        np.testing.assert_allclose(np.concatenate(oracle.values), x, rtol=1e-5, err_msg=f"step {k}")
    ratios = np.array(factors)[1:] / np.array(factors)[:-1]
    assert ratios.max() > 1.0999, "the limit of 10 % was met"
    assert np.any((ratios > 0.901) & (ratios < 1.099) & (ratios != 1)), "and not always"


def test_layer_scales_bring_all_layers_to_the_same_size() -> None:
    values = [*starting_values(), np.ones(3)]
    oracle = OneBitLambOracle([Group(values, 0.01)], 2, bucket_elements=128, warmup_steps=2)
    for step in (1, 2):
        oracle.step([[*of_worker, None] for of_worker in gradients_at(step, 2)])
    sizes = [float(np.sqrt(np.mean(p.m**2))) for p in oracle.parameters]
    for p in oracle.parameters[:-1]:
        np.testing.assert_allclose(np.sqrt(np.mean(p.h**2)), np.mean(sizes[:-1]), rtol=1e-12)
        np.testing.assert_allclose(p.h, p.layer_scale * p.m, rtol=1e-12)
    assert oracle.parameters[-1].layer_scale == 1.0
    assert not oracle.parameters[-1].h.any()


def test_the_layer_factor_is_the_largest_of_what_lives_and_changes_by_a_tenth() -> None:
    p = OneBitLambParameter(np.zeros(3), Group([], 1.0), np.arange(3), (0.0, 0.9), 0.0, 0.01, 10.0)
    p.updates, p.c_avg, p.m = 1, 2.0, np.array([1.0, 1.0, 1.0])
    p.P, p.w = np.array([1.0, 0.5, 0.0]), np.array([1.0, 1.0, 1e-9])
    for factor in (1.1, 1.21, 1.331, 1.4641, 1.61051, 1.771561, 1.9487171, 2.0, 2.0):
        p.onebit_lamb()
        assert p.factor == pytest.approx(factor)
    p.w = np.array([1e4, 1e4, 1e4])
    before = p.value.copy()
    p.onebit_lamb()
    assert p.factor == pytest.approx(1.8)
    np.testing.assert_allclose(p.value - before, [-2 * 1.8, -2 * 1.8 * 0.5, 0.0], rtol=1e-12)
    for _ in range(20):
        p.onebit_lamb()
    assert p.factor == 0.5

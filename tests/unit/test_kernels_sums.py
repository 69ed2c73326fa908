"""Sums have one order: words by halves in float32, 32 words by halves in double, and those one after another. Any other
would give other bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.unit.formulas import Array, Places
from tests.unit.kernel_cases import COUNTS, PATIENT, SEEDS, WORD, each_backend, guarded, kernels_of, same_everywhere
from tests.unit.sign_cases import (
    adam_case,
    in_flat,
    lamb_measure_case,
    momentum_encode_case,
    onebit_lamb_case,
    sign_encode_case,
    sign_merge_case,
)

TILE = 32
"""Words that are added up by halves."""
COUNT = 12_000
"""In five runs: each has a tile and more."""


def in_order(values: Array) -> float:
    """The sum of fp32 values as it is defined, one addition at a time."""
    words = [float(by_halves(word, WORD, np.float32(0.0))) for word in cut(list(values), WORD)]
    total = 0.0
    for tile in cut(words, TILE):
        total = total + by_halves(tile, TILE, 0.0)
    return total


def cut(numbers: list[Any], length: int) -> list[list[Any]]:
    return [numbers[start : start + length] for start in range(0, len(numbers), length)]


def by_halves(numbers: list[Any], length: int, zero: Any) -> Any:
    """The sum of so many numbers, those that are missing being zeros."""
    numbers = [*numbers, *[zero] * (length - len(numbers))]
    while len(numbers) > 1:
        half = len(numbers) // 2
        numbers = [type(zero)(numbers[j] + numbers[j + half]) for j in range(half)]
    return numbers[0]


def adversarial(count: int, seed: int) -> Array:
    """Magnitudes that swallow each other within words, and words that do, so that hardly two orders agree."""
    generator = np.random.default_rng(seed)
    of_words = np.repeat(generator.integers(-20, 20, -(-count // WORD)), WORD)[:count]
    values = generator.uniform(1, 2, count) * 2.0 ** (of_words + generator.integers(-14, 14, count))
    return (values * generator.choice([-1, 1], count)).astype(np.float32)


def test_the_numbers_are_adversarial() -> None:
    """Other orders, and other precisions, give other sums."""
    values = adversarial(5000, 0) ** 2
    expected = in_order(values)
    assert float(np.cumsum(values, dtype=np.float32)[-1]) != expected
    assert float(np.add.reduce(values.astype(np.float64))) != expected
    assert math.fsum(values.tolist()) != expected
    by_lanes = values[: 5000 // 64 * 64].reshape(-1, 64).cumsum(0, dtype=np.float32)[-1]
    assert in_order(by_lanes) != in_order(values[: 5000 // 64 * 64])
    neighbours = values[: 5000 // 64 * 64].reshape(-1, 2, 32).transpose(0, 2, 1).reshape(-1).copy()
    assert in_order(neighbours) != in_order(values[: 5000 // 64 * 64])


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 100, 4096, 4097, 5000])
def test_square_sum_has_the_order(count: int) -> None:
    values = adversarial(count, count)
    result = same_everywhere("square_sum", values=guarded(torch.from_numpy(values)))
    assert result == in_order(values * values)


@PATIENT
@given(COUNTS, SEEDS)
def test_square_sum_has_the_order_whatever_it_adds(count: int, seed: int) -> None:
    values = adversarial(count, seed)
    assert same_everywhere("square_sum", values=guarded(torch.from_numpy(values))) == in_order(values * values)


@each_backend
def test_adam_adds_run_after_run(backend: str) -> None:
    case = adam_case(COUNT, seed=3, pieces=5, update_variance=False)
    places = Places(case["runs"])
    v = np.abs(adversarial(COUNT, 4))
    case["v"].copy_(in_flat(torch.from_numpy(v), 3))
    total = 0.0
    for run in places.by_run(v):
        total = total + in_order(run)
    with kernels_of(backend) as kernels:
        assert kernels.adam_apply(**case) == total
    assert total != in_order(v)


@each_backend
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memories_have_the_order(backend: str, state_dtype: torch.dtype) -> None:
    """Their squares are those of what was stored."""
    start = in_flat(torch.from_numpy(adversarial(COUNT, 2)), 3)
    rule = {"seed": 3, "pieces": 5, "grad_dtype": torch.float32, "state_dtype": state_dtype}
    encode, momentum = sign_encode_case(COUNT, **rule), momentum_encode_case(COUNT, **rule, output=1, rate=0.5)
    merge = sign_merge_case(COUNT, seed=3, pieces=5, state_dtype=state_dtype, workers=3)
    for case in (encode, momentum):
        case["c"].copy_(start)
        case["grad"] = torch.from_numpy(adversarial(COUNT, 3))
        case["sent_scales"][1:] = 2.0**-8
    encode["answer_scales"][1:] = 0.3
    momentum["m"].copy_(start)
    merge["y"].copy_(start)
    merge["scales"].copy_(torch.tensor([[0.3], [0.7], [1e-3]]))
    with kernels_of(backend) as kernels:
        kernels.sign_encode(**encode)
        kernels.momentum_encode(**momentum)
        kernels.sign_merge(**merge)
    for case, memory in ((encode, "c"), (momentum, "c"), (merge, "y")):
        places = Places(case["runs"])
        values = case[memory].float().numpy()[places.element]
        assert case["sums"].tolist() == [in_order(run) for run in places.by_run(values * values)]


@each_backend
def test_what_lamb_measures_has_the_order(backend: str) -> None:
    measure, onebit = lamb_measure_case(COUNT, seed=3, pieces=5), onebit_lamb_case(COUNT, seed=3, pieces=5)
    places = Places(measure["runs"])
    x, p = adversarial(COUNT, 4), np.abs(adversarial(COUNT, 5))
    for case in (measure, onebit):
        case["x"].copy_(torch.from_numpy(x))
    onebit["p"].copy_(in_flat(torch.from_numpy(p), 3))
    onebit["scales"][1:] = 1.0
    with kernels_of(backend) as kernels:
        kernels.lamb_measure(**measure)
        kernels.onebit_lamb_measure(**(onebit | {"shrink": 1.0, "unbias": 1.0, "weight_decay": 0.0}))
    assert measure["sums"][:, 0].tolist() == [in_order(run) for run in places.by_run(x * x)]
    v = measure["v"].numpy()[places.element]
    assert measure["sums"][:, 2].tolist() == [in_order(run) for run in places.by_run(v)]
    squares = [in_order(run) for run in places.by_run(p * p)]
    assert onebit["sums"][:, 0].tolist() == squares
    assert onebit["sums"][:, 1].tolist() == squares

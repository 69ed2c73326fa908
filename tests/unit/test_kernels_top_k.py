"""The largest of many values, and sums at few places: native kernels equal the reference, and both plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.kernel_cases import (
    COUNTS,
    PATIENT,
    SEEDS,
    allocation,
    each_backend,
    guarded,
    hard_gradient,
    kernels_of,
    random,
    same_everywhere,
)
from tests.unit.markov_cases import same_selection, top_k_case
from tests.unit.sign_cases import moderate


def best(values: Tensor, k: int) -> list[int]:
    """The `k` largest magnitudes, of equal ones the first, by Python's sort."""
    magnitudes = values.abs().tolist()
    return sorted(sorted(range(len(magnitudes)), key=lambda i: (-magnitudes[i], i))[:k])


# The largest ---------------------------------------------------------------------------------------------------------


def spread(count: int, generator: torch.Generator) -> Tensor:
    """Difficult numbers, the largest of them infinite."""
    return hard_gradient(count, torch.float32, generator, finite=False).nan_to_num_(-1.0, torch.inf, -torch.inf)


def few_magnitudes(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(-2, 3, (count,), generator=generator).float()


STREAMS: dict[str, Any] = {
    "spread": spread,
    "few magnitudes": few_magnitudes,
    "ascending": lambda count, generator: moderate(count, generator).abs().sort().values,
    "descending": lambda count, generator: -moderate(count, generator).abs().sort(descending=True).values,
    "zeros of both signs": lambda count, generator: 0.0 * moderate(count, generator),
    "all equal": lambda count, _: torch.tensor([3.0, -3.0]).repeat(count)[:count],
    "one": lambda count, generator: torch.eye(count)[int(torch.randint(0, count, (), generator=generator))],
    "largest last": lambda count, generator: torch.cat([few_magnitudes(count - 1, generator), torch.tensor([-9.0])]),
}
"""Streams of values, some of which raise the bar with every one of them, and some never."""


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 127, 128, 1000, 2113])
def test_top_k_of_every_stream(stream: str, count: int) -> None:
    values = STREAMS[stream](count, random(count))
    for k in {1, 2, 63, 64, 65, count // 10, count // 2, count - 1, count} & set(range(1, count + 1)):
        assert same_selection("top_k", **top_k_case(values, k)) == best(values, k)


@PATIENT
@given(
    stream=st.sampled_from([*STREAMS]),
    count=COUNTS,
    seed=SEEDS,
    share=st.one_of(st.just(1.0), st.floats(0, 1), st.floats(0, 0.05)),
    elements_off=st.integers(0, 9),
)
def test_top_k_whatever_it_is_given(stream: str, count: int, seed: int, share: float, elements_off: int) -> None:
    values, k = STREAMS[stream](count, random(seed)), max(1, round(share * count))
    case = top_k_case(values, k, elements_off=elements_off)
    assert same_selection("top_k", **case) == best(values, k)


@pytest.mark.parametrize("k", [1, 100, 30_000])
def test_top_k_of_many(k: int) -> None:
    values = torch.randn(300_001, generator=random(0))
    indices = same_selection("top_k", **top_k_case(values, k))
    bar = values.abs().sort(descending=True).values[k - 1]
    assert torch.equal(torch.tensor(indices), (values.abs() >= bar).nonzero().flatten())  # no other equals it


@each_backend
def test_nothing_is_the_top_of_something(backend: str) -> None:
    case = top_k_case(torch.randn(100, generator=random(0)), 0)
    with kernels_of(backend) as kernels:
        kernels.top_k(case["values"], case["indices"], case["scratch"])
    for name in ("indices", "scratch"):
        assert bool((allocation(case[name]) == 0xA5).all())


# Sums at few places --------------------------------------------------------------------------------------------------


def sparse_add_case(
    count: int, k: int, *, seed: int, outside: float = 0.0, weight: float = -0.3, elements_off: int = 0
) -> dict[str, Any]:
    """Indices in any order, some of them several times and a share of them `outside`."""
    generator = random(seed)
    indices = torch.randint(0, count, (k,), generator=generator)
    wrong = torch.tensor([-1, count, -count, count + 1, 2**31 - 1, -(2**31)])
    which = wrong[torch.randint(0, len(wrong), (k,), generator=generator)]
    indices = torch.where(torch.rand(k, generator=generator) < outside, which, indices)
    return {
        "values": guarded(moderate(count, generator), elements_off=elements_off),
        "indices": guarded(indices.to(torch.int32)),
        "amounts": guarded(moderate(k, generator)),
        "weight": weight,
    }


@PATIENT
@given(
    count=COUNTS,
    k=st.one_of(st.just(0), st.integers(1, 500)),
    seed=SEEDS,
    outside=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    weight=st.one_of(st.just(1.0), st.floats(-100, 100)),
    elements_off=st.integers(0, 9),
)
def test_sparse_add_whatever_it_is_given(**case: Any) -> None:
    same_everywhere("sparse_add", **sparse_add_case(**case))


@each_backend
@pytest.mark.parametrize("outside", [0.0, 0.2])
@pytest.mark.parametrize("count", [1, 3, 700])
def test_sparse_add_adds_one_after_the_other(backend: str, count: int, outside: float) -> None:
    """Products are rounded before they are added; with an index that is none of the values' nothing is."""
    case = sparse_add_case(count, 500, seed=1, outside=outside)
    values, weight = case["values"].numpy().copy(), np.float32(-0.3)
    for index, amount in zip(case["indices"].tolist(), case["amounts"].numpy(), strict=True):
        if not outside:
            values[index] = np.float32(values[index] + np.float32(weight * amount))
    with kernels_of(backend) as kernels:
        assert kernels.sparse_add(**case) is (outside == 0.0)
    np.testing.assert_array_equal(case["values"].numpy().view(np.int32), values.view(np.int32))


@each_backend
@pytest.mark.parametrize("index", [-1, -64, 100, 101, 163, 2**31 - 1, -(2**31)])
def test_sparse_add_writes_nothing_outside(backend: str, index: int) -> None:
    values = guarded(torch.ones(100))
    before = allocation(values).clone()
    indices = torch.tensor([index], dtype=torch.int32)
    with kernels_of(backend) as kernels:
        assert kernels.sparse_add(values, indices, torch.ones(1), weight=1.0) is False
    assert torch.equal(allocation(values), before)

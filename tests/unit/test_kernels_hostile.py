"""Numbers that no honest peer sends: whatever they are, kernels stay within their memory and select what there is.

What the numbers become is nobody's business; a checksum tells an accident from them, and nothing tells a traitor.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.unit.kernel_cases import each_backend, guarded, kernels_of, random
from tests.unit.markov_cases import scratch_for, sketch_scratch_for
from thinwire.compressors.codecs.count_sketch import CountSketch
from thinwire.kernels.ops import BACKENDS

NAN_BITS = [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001]
SHARES = [1.0, 0.6, 0.01]


def hostile(count: int, bits: int, share: float) -> Tensor:
    """Numbers of which a share are NaN with those bits."""
    values = torch.randn(count, generator=random(count))
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    return torch.where(torch.rand(count, generator=random(1)) < share, nan, values)


def assert_selection(indices: Tensor, among: range) -> None:
    found = indices.tolist()
    assert found == sorted(set(found))
    assert all(index in among for index in found)


@each_backend
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("bits", NAN_BITS, ids=hex)
@pytest.mark.parametrize(("count", "k"), [(1, 1), (64, 3), (1000, 10), (1000, 1000), (150_000, 1500)])
def test_the_largest_of_what_is_not_a_number(backend: str, count: int, k: int, bits: int, share: float) -> None:
    values = guarded(hostile(count, bits, share))
    indices = guarded(torch.full((k,), -1, dtype=torch.int32))
    with kernels_of(backend) as kernels:
        kernels.top_k(values, indices, scratch_for(k))
    assert_selection(indices, range(count))
    most = min(k, int(values.isnan().sum()))
    assert int(values[indices].isnan().sum()) == most


@each_backend
@pytest.mark.parametrize("bits", NAN_BITS, ids=hex)
def test_nothing_is_the_top_of_what_is_not_a_number(backend: str, bits: int) -> None:
    with kernels_of(backend) as kernels:
        kernels.top_k(guarded(hostile(100, bits, 1.0)), guarded(torch.zeros(0, dtype=torch.int32)), scratch_for(0))


@each_backend
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("bits", [*NAN_BITS, 0x7F800000], ids=hex)
@pytest.mark.parametrize(("rows", "columns", "k"), [(1, 64, 1), (3, 64, 40), (5, 200, 40), (4, 1, 700)])
def test_a_sketch_of_what_is_not_a_number(
    backend: str, rows: int, columns: int, k: int, bits: int, share: float
) -> None:
    """As many are selected as are asked for, each of them once, and all from where they are asked for."""
    table = guarded(hostile(rows * columns, bits, share)).view(rows, columns)
    coefficients = CountSketch(BACKENDS["reference"], rows, columns, seed=1)._coefficients
    peak = guarded(torch.rand(1000, generator=random(2)) + 1e-3)
    ranges = torch.tensor([[64, 300], [512, 488]])
    indices = guarded(torch.full((k,), -1, dtype=torch.int32))
    with kernels_of(backend) as kernels:
        kernels.sketch_top_k(table, peak, ranges, indices, sketch_scratch_for(k, table), coefficients=coefficients)
    assert_selection(indices, range(64, 1000))
    assert not bool(((indices >= 364) & (indices < 512)).any())


@each_backend
@pytest.mark.parametrize("index", [-1, 100, 101, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("at", [0, 7])
def test_an_index_outside_is_refused_before_anything_is_added(backend: str, index: int, at: int) -> None:
    values = guarded(torch.zeros(100))
    indices = torch.arange(8, dtype=torch.int32)
    indices[at] = index
    amounts = guarded(torch.full((8,), math.nan))
    with kernels_of(backend) as kernels:
        assert kernels.sparse_add(values, guarded(indices), amounts, weight=1.0) is False
    assert torch.equal(values, torch.zeros(100))

"""Count sketches: native kernels equal the reference to the bit, both the formulas, and hashes are as random as needed.

Statistical tests have fixed seeds, so they pass or fail for good. That a right implementation fails one of them has a
probability below 1e-6, by Hoeffding's or Bernstein's inequality.
"""

from __future__ import annotations

import math
import mmap
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.formulas import Array
from tests.unit.kernel_cases import (
    COUNTS,
    PATIENT,
    SEEDS,
    TAILS,
    WORD,
    allocation,
    each_backend,
    guarded,
    kernels_of,
    random,
    same_everywhere,
)
from tests.unit.markov_cases import (
    PRIME,
    coefficients_of,
    same_selection,
    sketch_case,
    sketch_scratch_for,
    sketch_top_k_case,
)
from tests.unit.test_kernels_invariants import vast
from tests.unit.test_kernels_sums import adversarial
from thinwire.kernels.ops import Kernels
from thinwire.kernels.reference import hashes
from thinwire.kernels.rng import _mix

LAST_WORD = 2**31 - WORD
"""The first element of the last word that has elements below the prime, of which there are 63."""
CORNERS = [0, 1, 2, 63, 64, 12_345, 2**16, 2**24 + 1, 2**30, LAST_WORD - 1, LAST_WORD, PRIME - 1]

SKETCH: dict[str, Any] = {
    "seed": SEEDS,
    "rows": st.integers(1, 15),
    "columns": st.one_of(st.integers(1, 4), st.integers(1, 3000)),
}
FIRST = st.one_of(st.integers(0, 100), st.integers(0, LAST_WORD // WORD - 100)).map(lambda word: word * WORD)


def polynomial(coefficients: list[int], element: int) -> int:
    return sum(a * element**power for power, a in enumerate(coefficients)) % PRIME


def places(coefficients: Tensor, columns: int, elements: list[int]) -> tuple[Array, Array]:
    """Signs and columns of elements in each row, from their definition in Python's integers."""
    h = [[polynomial(row, element) for element in elements] for row in coefficients.tolist()]
    signs = [[1.0 if value % 2 == 0 else -1.0 for value in row] for row in h]
    return np.array(signs, dtype=np.float32), np.array([[(value >> 1) * columns >> 30 for value in row] for row in h])


def estimates(table: Tensor, coefficients: Tensor, elements: list[int]) -> Array:
    """The estimates of a table, in float32."""
    signs, columns = places(coefficients, table.shape[1], elements)
    sent_words = np.sort(signs * np.take_along_axis(table.numpy(), columns, 1), axis=0)
    rows = table.shape[0]
    return sent_words[rows // 2] if rows % 2 else (sent_words[rows // 2 - 1] + sent_words[rows // 2]) * np.float32(0.5)


# The hashes ----------------------------------------------------------------------------------------------------------


def test_a_hash_is_a_polynomial() -> None:
    extreme = torch.tensor([[PRIME - 1] * 4, [0] * 4, [0, 0, 0, PRIME - 1], [PRIME - 1, 0, 0, 1]])
    coefficients = torch.cat([coefficients_of(6, random(0)), extreme])
    found = hashes(coefficients, torch.tensor(CORNERS))
    assert found.tolist() == [[polynomial(row, element) for element in CORNERS] for row in coefficients.tolist()]


@each_backend
@pytest.mark.parametrize("columns", [1, 2, 3, 1000, 2**16])
def test_an_element_counts_where_its_hash_points(backend: str, columns: int) -> None:
    """One element of the value 1 in an empty table shows its signs and its columns, and the table shows it again.

    Two rows have the same hash for all: the largest, and one that falls into the first of three columns only as the
    bit of its sign does not count.
    """
    same_for_all = torch.tensor([[PRIME - 1, 0, 0, 0], [2**31 // 3 + 1, 0, 0, 0]])
    coefficients = torch.cat([coefficients_of(5, random(columns)), same_for_all])
    signs, at = places(coefficients, columns, CORNERS)
    for i, element in enumerate(CORNERS):
        table, first = guarded(torch.zeros(7, columns)), element // WORD * WORD
        values = torch.zeros(min(WORD, PRIME - first))
        values[element - first] = 1.0
        expected = np.zeros((7, columns), dtype=np.float32)
        expected[np.arange(7), at[:, i]] = signs[:, i]
        with kernels_of(backend) as kernels:
            kernels.sketch_add(values, table, coefficients, first=first)
            np.testing.assert_array_equal(table.numpy(), expected)
            kernels.sketch_estimate(table, values, coefficients, first=first, weight=-1.0)
        assert float(values[element - first]) == 0.0


SAMPLES = 200_000
QUADRUPLES = [(0, 1, 2, 3), (64, 65, 128, 129), (5, 70, 2**20, 2**30 + 7), (PRIME - 1, 0, PRIME // 2, 1)]


def hoeffding(samples: int, probability: float) -> float:
    """How far from its expectation the mean of samples between -1 and 1 is with less than a probability."""
    return math.sqrt(2 * math.log(2 / probability) / samples)


@pytest.mark.parametrize("elements", QUADRUPLES)
def test_signs_of_two_and_of_four_elements_are_balanced(elements: tuple[int, ...]) -> None:
    """The means of their products are 0 (but for 2^-31, as there is one even number more below the prime)."""
    h = hashes(coefficients_of(SAMPLES, random(1)), torch.tensor(elements))
    signs = 1.0 - 2.0 * (h % 2).double()
    bound = hoeffding(SAMPLES, 1e-8)
    assert bound < 0.014
    for a in range(4):
        assert abs(float(signs[:, a].mean())) < bound
        for b in range(a):
            assert abs(float((signs[:, a] * signs[:, b]).mean())) < bound
    assert abs(float(signs.prod(1).mean())) < bound


def test_signs_by_polynomials_of_a_lower_degree_are_not() -> None:
    """The test above can fail."""
    coefficients = coefficients_of(SAMPLES, random(1))
    coefficients[:, 2:] = 0
    signs = 1.0 - 2.0 * (hashes(coefficients, torch.tensor(QUADRUPLES[0])) % 2).double()
    assert abs(float(signs.prod(1).mean())) > 10 * hoeffding(SAMPLES, 1e-8)


@pytest.mark.parametrize("columns", [2, 7, 100])
def test_two_elements_share_a_column_as_often_as_they_should(columns: int) -> None:
    """With probability 1 / columns; and their columns are independent of their signs."""
    coefficients = coefficients_of(SAMPLES, random(2))
    bound = hoeffding(SAMPLES, 1e-8) / 2  # of samples between 0 and 1
    for a, b in ((0, 1), (63, 64), (5, 2**30), (0, PRIME - 1)):
        h = hashes(coefficients, torch.tensor([a, b]))
        at = (h >> 1) * columns >> 30
        collide = at[:, 0] == at[:, 1]
        assert abs(float(collide.double().mean()) - 1 / columns) < bound
        alike = (h[:, 0] - h[:, 1]) % 2 == 0
        assert abs(float((collide & alike).double().mean()) - 0.5 / columns) < bound
    shares = torch.bincount(at[:, 0], minlength=columns).double() / SAMPLES
    assert shares.numel() == columns
    assert float((shares - 1 / columns).abs().max()) < bound


# Adding --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", range(1, 8))
def test_sketch_add_for_every_tail(rows: int) -> None:
    for seed, count in enumerate(TAILS[:-1]):
        same_everywhere("sketch_add", **sketch_case(count, seed=seed, rows=rows, columns=1 + 97 * seed**2))


@PATIENT
@given(**SKETCH, count=COUNTS, first=FIRST, elements_off=st.integers(0, 9), filled=st.booleans())
def test_sketch_add_whatever_it_is_given(**case: Any) -> None:
    same_everywhere("sketch_add", **sketch_case(**case))


def test_sketch_add_of_many_to_a_large_table() -> None:
    same_everywhere("sketch_add", **sketch_case(150_001, seed=1, rows=3, columns=100_003))


def test_sketch_add_up_to_the_last_element() -> None:
    same_everywhere(
        "sketch_add", **sketch_case(PRIME - LAST_WORD + WORD, seed=1, rows=5, columns=77, first=LAST_WORD - WORD)
    )


@each_backend
@pytest.mark.parametrize("columns", [1, 3, 50])
def test_cells_are_added_up_in_the_order_of_the_elements(backend: str, columns: int) -> None:
    """With numbers of which hardly two orders have the same sum."""
    case = sketch_case(3000, seed=2, rows=2, columns=columns, first=7 * WORD)
    values = adversarial(3000, 1)
    case["values"].copy_(torch.from_numpy(values))
    expected = case["table"].numpy().copy()
    signs, at = places(case["coefficients"], columns, list(range(7 * WORD, 7 * WORD + 3000)))
    for row in range(2):
        for value, sign, column in zip(values, signs[row], at[row], strict=True):
            expected[row, column] += sign * value
    with kernels_of(backend) as kernels:
        kernels.sketch_add(**case)
    np.testing.assert_array_equal(case["table"].numpy(), expected)


@PATIENT
@given(
    **SKETCH,
    count=st.integers(1, 3000),
    cuts=st.lists(st.integers(1, 46), max_size=4, unique=True),
)
def test_a_cut_makes_no_difference(seed: int, rows: int, columns: int, count: int, cuts: list[int]) -> None:
    """Pieces one after the other are the whole, to the bit."""
    whole, parted = (sketch_case(count, seed=seed, rows=rows, columns=columns, first=5 * WORD) for _ in range(2))
    same_everywhere("sketch_add", **whole)
    edges = [0, *sorted(WORD * at for at in cuts if WORD * at < count), count]
    for start, stop in pairwise(edges):
        piece = {"values": parted["values"][start:stop], "first": 5 * WORD + start}
        same_everywhere("sketch_add", **(parted | piece))
    assert torch.equal(allocation(parted["table"]), allocation(whole["table"]))


def sketched(kernels: Kernels, values: Tensor, coefficients: Tensor, columns: int) -> Tensor:
    table = torch.zeros(coefficients.shape[0], columns)
    kernels.sketch_add(values, table, coefficients, first=0)
    return table


@each_backend
def test_sketches_are_linear(backend: str) -> None:
    """Exactly, where nothing is rounded; else as far as roundings let them."""
    coefficients, columns = coefficients_of(5, random(0)), 40
    with kernels_of(backend) as kernels:
        for exact in (True, False):
            a, b = (torch.randn(2000, generator=random(seed)) * 100 for seed in (1, 2))
            if exact:
                a, b = a.round(), b.round()
            sum_of_both = sketched(kernels, a, coefficients, columns) + sketched(kernels, b, coefficients, columns)
            both = sketched(kernels, a + b, coefficients, columns)
            assert float(both.abs().max()) > 100
            torch.testing.assert_close(both, sum_of_both, rtol=0, atol=0.0 if exact else 1e-2)
            four_times = sketched(kernels, a * 4, coefficients, columns)
            assert torch.equal(four_times, 4 * sketched(kernels, a, coefficients, columns))


# Estimates -----------------------------------------------------------------------------------------------------------


def estimate_case(**options: Any) -> dict[str, Any]:
    weight = options.pop("weight", -0.7)
    return sketch_case(**options) | {"weight": weight}


@pytest.mark.parametrize("rows", range(1, 16))
def test_sketch_estimate_for_every_tail(rows: int) -> None:
    for seed, count in enumerate(TAILS[:-1]):
        case = estimate_case(count=count, seed=seed, rows=rows, columns=1 + 97 * seed**2)
        same_everywhere("sketch_estimate", **case)


@PATIENT
@given(**SKETCH, count=COUNTS, first=FIRST, elements_off=st.integers(0, 9), weight=st.floats(-100, 100))
def test_sketch_estimate_whatever_it_is_given(**case: Any) -> None:
    same_everywhere("sketch_estimate", **estimate_case(**case))


@pytest.mark.parametrize("weight", [1.0, -1.0])
def test_an_estimate_of_zero_is_positive(weight: float) -> None:
    """Rows can have zeros of both signs, and a value of -0 would show which of them was taken for the median."""
    for rows in range(1, 16):
        case = estimate_case(count=300, seed=rows, rows=rows, columns=20, weight=weight)
        case["table"].mul_(0.0)
        case["values"].fill_(-0.0)
        same_everywhere("sketch_estimate", **case)
        assert torch.signbit(case["values"]).tolist() == [weight < 0] * 300


@each_backend
@pytest.mark.parametrize("rows", range(1, 16))
def test_sketch_estimate_is_the_formula(backend: str, rows: int) -> None:
    first = LAST_WORD - 4 * WORD
    case = estimate_case(count=300, seed=3, rows=rows, columns=50, first=first, weight=0.25)
    elements = list(range(first, first + 300))
    median = estimates(case["table"], case["coefficients"], elements)
    if rows == 4:
        signs, at = places(case["coefficients"], 50, elements)
        assert np.isclose(np.median(signs * np.take_along_axis(case["table"].numpy(), at, 1), axis=0), median).all()
    expected = case["values"].numpy() + np.float32(0.25) * median
    with kernels_of(backend) as kernels:
        kernels.sketch_estimate(**case)
    np.testing.assert_array_equal(case["values"].numpy(), expected)


def bernstein(samples: int, variance: float, largest: float, probability: float) -> float:
    """How far the mean of samples is from its expectation with less than a probability."""
    log = math.log(2 / probability)
    return log * largest / (3 * samples) + math.sqrt(
        (log * largest / (3 * samples)) ** 2 + 2 * log * variance / samples
    )


@each_backend
def test_estimates_are_unbiased(backend: str) -> None:
    """Of one row: the mean over many hashes is the value, and its variance what the other squares are per column."""
    count, columns, samples = 64, 32, 6000
    values = torch.randn(count, generator=random(5))
    sent_words = torch.zeros(samples, count)
    with kernels_of(backend) as kernels:
        for sample, coefficients in enumerate(coefficients_of(samples, random(6))[:, None]):
            table = sketched(kernels, values, coefficients, columns)
            kernels.sketch_estimate(table, sent_words[sample], coefficients, first=0, weight=1.0)
    errors = (sent_words - values).double()
    squares, magnitudes = float((values**2).sum()), float(values.abs().sum())
    bound = bernstein(samples, squares / columns, magnitudes, 1e-6 / count)
    assert bound < 0.25
    assert float(errors.mean(0).abs().max()) < bound
    nine_deviations = 9 * 0.0043
    assert float((errors**2).mean()) == pytest.approx(squares * (1 - 1 / count) / columns, rel=nine_deviations)


# The largest estimates -----------------------------------------------------------------------------------------------


def best(case: dict[str, Any]) -> list[int]:
    """By Python's sort, in float32."""
    elements = [first + i for first, count in case["ranges"].tolist() for i in range(count)]
    keys = np.abs(estimates(case["table"], case["coefficients"], elements)) / np.sqrt(case["peak"].numpy()[elements])
    ordered = sorted(range(len(elements)), key=lambda i: (-keys[i], i))
    return sorted(elements[i] for i in ordered[: case["indices"].numel()])


@pytest.mark.parametrize("rows", range(1, 8))
@pytest.mark.parametrize("counts", [[1], [63], [64], [65], [1, 1, 64, 65, 200]], ids=str)
def test_sketch_top_k_is_the_formula(counts: list[int], rows: int) -> None:
    for k in {1, sum(counts) // 7, sum(counts) // 2, sum(counts)} - {0}:
        for columns in (1, 5, 1000):
            case = sketch_top_k_case(counts, k, seed=rows, rows=rows, columns=columns)
            expected = best(case)
            assert same_selection("sketch_top_k", **case) == expected


@PATIENT
@given(
    **SKETCH,
    counts=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    share=st.one_of(st.just(1.0), st.floats(0, 1), st.floats(0, 0.05)),
)
def test_sketch_top_k_whatever_it_is_given(counts: list[int], share: float, **case: Any) -> None:
    same_selection("sketch_top_k", **sketch_top_k_case(counts, max(1, round(share * sum(counts))), **case))


@pytest.mark.parametrize("rows", [1, 2, 5, 6])
@pytest.mark.parametrize("share", [1e-5, 0.01, 0.3])
def test_sketch_top_k_of_more_than_it_looks_at_together(rows: int, share: float) -> None:
    """Here a sample decides which elements are read. Roots of `peak` span more than cells are rounded to."""
    counts = [2**18 + 65, 64 * 300 + 1, 7]
    case = sketch_top_k_case(counts, math.ceil(share * sum(counts)), seed=rows, rows=rows, columns=5000)
    case["table"].copy_(torch.randn(rows, 5000, generator=random(3)))
    assert same_selection("sketch_top_k", **case) == sorted(set(case["indices"].tolist()))
    peak = case["peak"]
    peak.copy_(torch.where(peak.isnan(), peak, torch.exp2(6 * torch.randn(peak.shape, generator=random(4)))))
    same_selection("sketch_top_k", **case)
    peak.copy_(torch.where(peak.isnan(), peak, 1e-4))
    same_selection("sketch_top_k", **case)


def sampled(total: int) -> list[int]:
    """The elements that the native kernel reads first, of one range that begins at 0."""
    samples = min(total // 8, 2**15)
    draws = _mix(torch.arange(samples), 0, 0).tolist()
    starts = [i * total // samples for i in range(samples + 1)]
    return [start + (draw * (stop - start) >> 32) for (start, stop), draw in zip(pairwise(starts), draws, strict=True)]


@pytest.mark.parametrize("favoured", [True, False])
def test_a_sample_that_misleads_changes_nothing(favoured: bool) -> None:
    """If the elements that are read first have the largest keys, too few of the others are as large."""
    total, k = 80_000, 15_000
    case = sketch_top_k_case([total], k, seed=0, rows=5, columns=1000)  # of this seed the range begins at 0
    assert case["ranges"].tolist() == [[0, total]]
    case["table"].copy_(torch.randn(5, 1000, generator=random(3)))
    case["peak"].fill_(1.0)[sampled(total)] = 1e-12 if favoured else 1e12
    chosen = same_selection("sketch_top_k", **case)
    assert len(set(chosen) & set(sampled(total))) == (10_000 if favoured else 0)


@pytest.mark.parametrize("cells", [0, 3, 40])
def test_zeros_are_selected_if_there_is_not_enough_else(cells: int) -> None:
    """Of one magnitude, the lowest elements: a table that is almost empty, as of gradients of few rows."""
    total = 2**18 + 2**17
    case = sketch_top_k_case([total], 20_000, seed=0, rows=3, columns=2000)
    case["table"].zero_()
    case["table"][:, :cells] = 1e-30
    case["peak"].fill_(1.0)
    selection = same_selection("sketch_top_k", **case)
    assert set(range(10_000)) <= set(selection)
    assert (selection == list(range(20_000))) == (cells == 0)


@pytest.mark.parametrize("peak", [0.0, math.inf, 1e-45, 3e38])
def test_a_peak_that_is_no_ordinary_number(peak: float) -> None:
    """Quotients are infinite, zero or no numbers then."""
    case = sketch_top_k_case([20_000], 500, seed=0, rows=5, columns=1000)
    case["peak"][::70] = peak
    case["table"][:, ::3] = 0.0
    same_selection("sketch_top_k", **case)


def test_ties_go_to_the_lower_element() -> None:
    """An empty table makes everything a tie, and a table of few magnitudes much of it."""
    case = sketch_top_k_case([100, 30, 70], 120, seed=0, rows=3, columns=9)
    case["table"].zero_()
    asked = [first + i for first, count in case["ranges"].tolist() for i in range(count)]
    assert same_selection("sketch_top_k", **case) == asked[:120]
    case["table"].copy_(torch.randint(-1, 2, (3, 9), generator=random(1)))
    case["peak"].fill_(4.0)
    expected = best(case)
    assert expected != asked[:120]
    assert same_selection("sketch_top_k", **case) == expected


@each_backend
def test_heavy_coordinates_are_found_again(backend: str) -> None:
    """Among 20,000, of which a table has a tenth of the room; units make the lightest of them stand out the most."""
    count, heavy = 20_000, [3, 64, 127, 4_000, 4_001, 12_345, 19_999]
    values = torch.randn(count, generator=random(0)) * 0.01
    peak = torch.ones(count)
    values[heavy] = torch.tensor([1.0, -2.0, 3.0, -1.0, 5.0, 1.0, 0.5])
    peak[19_999] = 1e-4
    coefficients, k = coefficients_of(5, random(1)), len(heavy)
    indices, found = torch.zeros(k, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    ranges = torch.tensor([[0, 64], [64, 19_000], [19_072, 928]])
    with kernels_of(backend) as kernels:
        table = sketched(kernels, values, coefficients, 400)
        kernels.sketch_top_k(table, peak, ranges, indices, sketch_scratch_for(k, table), coefficients=coefficients)
        assert indices.tolist() == heavy
        kernels.sketch_top_k(table, peak, ranges, found, sketch_scratch_for(1, table), coefficients=coefficients)
        assert found.tolist() == [19_999]
        kernels.sketch_estimate(table, values, coefficients, first=0, weight=-1.0)
    assert float(values[heavy].abs().max()) < 0.2


@pytest.mark.skipif(not hasattr(mmap, "MAP_ANONYMOUS"), reason="needs memory that is not there until it is touched")
@each_backend
def test_the_last_elements_are_found_too(backend: str) -> None:
    peak = vast(2**31, torch.float32)
    first = LAST_WORD - WORD
    peak[first:] = 1.0
    coefficients, table = coefficients_of(3, random(0)), torch.zeros(3, 5000)
    values = torch.zeros(PRIME - first)
    values[[0, 40, 126]] = 1.0
    indices = torch.zeros(3, dtype=torch.int32)
    with kernels_of(backend) as kernels:
        kernels.sketch_add(values, table, coefficients, first=first)
        ranges = torch.tensor([[first, PRIME - first]])
        kernels.sketch_top_k(table, peak, ranges, indices, sketch_scratch_for(3, table), coefficients=coefficients)
    assert indices.tolist() == [first, first + 40, PRIME - 1]

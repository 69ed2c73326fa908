"""Finite numbers near the largest float32: means that do not overflow, and gradients whose squares would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.kernel_cases import ISAS, allocation, copy_of, guarded, random, same_everywhere
from tests.unit.markov_cases import markov_difference_case, markov_encode_case, momentum_sum_case
from tests.unit.sign_cases import dense_encode_case
from thinwire.kernels import ops
from thinwire.kernels.modes import LARGEST, MarkovMode

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # NumPy's, as it interprets

HUGE = 2e38
SPIKE = 1e20
"""Its square is larger than the largest float32."""
INF, NAN = float("inf"), float("nan")


def same_on_triton(operation: str, case: dict[str, Any]) -> None:
    """As `same_everywhere` has it, interpreted on the CPU."""
    pytest.importorskip("triton")
    ours, theirs = ({name: copy_of(argument) for name, argument in case.items()} for _ in range(2))
    expected = getattr(ops.BACKENDS["reference"], operation)(**theirs)
    bad = torch.zeros(1, dtype=torch.int32)
    more = {"bad": bad} if operation in ops.FINDING else {}
    getattr(ops.BACKENDS["triton"], operation)(**ours, **more)
    if more:
        assert bool(bad) is expected
    for name, argument in theirs.items():
        if isinstance(argument, Tensor):
            assert torch.equal(allocation(ours[name]), allocation(argument)), name


# The mean -------------------------------------------------------------------------------------------------------------


def mean_of(rows: Tensor) -> Tensor:
    case = {"rows": guarded(rows), "out": guarded(torch.zeros(rows.shape[1]))}
    same_on_triton("mean", case)
    same_everywhere("mean", **case)
    return case["out"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_a_mean_of_huge_numbers_is_finite(n: int, dtype: torch.dtype) -> None:
    """As it is with DDP, which divides before it adds."""
    rows = torch.full((n, 2500), HUGE).to(dtype)
    rows[:, 1::2] = -rows[:, 1::2]
    found = mean_of(rows)
    assert torch.allclose(found, rows[0].float(), rtol=1e-6)


def test_only_elements_whose_sum_overflows_are_added_in_another_way() -> None:
    """One in the second tile of three: all others have the bits that they always had."""
    rows = torch.randn(5, 3000, generator=random(0))
    plain = mean_of(rows)
    rows[:, 1500] = HUGE
    found = mean_of(rows)
    assert found[1500] == pytest.approx(HUGE, rel=1e-6)
    others = torch.arange(3000) != 1500
    assert torch.equal(found[others], plain[others])


def test_a_sum_that_overflows_on_the_way_and_comes_back_has_a_mean() -> None:
    rows = torch.tensor([[HUGE], [HUGE], [-HUGE], [-HUGE]])
    assert mean_of(rows).tolist() == [0.0]


@pytest.mark.parametrize(("numbers", "expected"), [((INF, 1.0), INF), ((-INF, HUGE), -INF), ((INF, -INF), NAN)])
def test_what_was_not_finite_before_still_is_not(numbers: tuple[float, float], expected: float) -> None:
    (found,) = mean_of(torch.tensor([[number] for number in numbers])).tolist()
    assert found == expected or (found != found and expected != expected)


# Gradients that are too large to be squared ---------------------------------------------------------------------------

CASES: dict[str, Any] = {
    "dense_encode": lambda **of: dense_encode_case(200, seed=3, **of),
    "momentum_sum": lambda **of: momentum_sum_case(200, seed=3, **of),
    "markov_encode": lambda **of: markov_encode_case(200, seed=3, **of),
    "markov_encode of a momentum": lambda **of: markov_encode_case(200, seed=3, momentum=True, **of),
    "markov_encode of a greeting": lambda **of: markov_encode_case(200, seed=3, mode=MarkovMode.ACTIVATION, **of),
    "markov_difference": lambda **of: markov_difference_case(200, seed=3, **of),
    "markov_difference of a momentum": lambda **of: markov_difference_case(200, seed=3, momentum=True, **of),
}
each_case = pytest.mark.parametrize("name", CASES)


def case_of(name: str, spike: float, scale: float = 1.0) -> tuple[str, dict[str, Any]]:
    """A small gradient with one large number in it."""
    case = CASES[name](grad_dtype=torch.float32)
    case["grad"].copy_(torch.randn(200, generator=random(0)))
    case["grad"][70] = spike
    case["scale"] = scale
    return name.split()[0], case


def run(name: str, spike: float, scale: float = 1.0, **limit: float) -> tuple[bool, dict[str, Any]]:
    operation, case = case_of(name, spike, scale)
    same_on_triton(operation, case | limit)
    return same_everywhere(operation, **case, **limit), case


@each_case
def test_without_a_limit_only_non_finite_gradients_are_reported(name: str) -> None:
    assert run(name, 1e15)[0] is False
    assert run(name, 1e15, largest=LARGEST)[0] is False
    assert run(name, INF)[0] is True
    assert run(name, NAN)[0] is True


@each_case
@pytest.mark.parametrize("spike", [1e10, -1e10, 1e15, SPIKE, INF, -INF, NAN])
def test_a_gradient_above_the_limit_is_reported(name: str, spike: float) -> None:
    assert run(name, spike, largest=9.9e9)[0] is True


@each_case
def test_the_limit_is_of_the_scaled_gradient_and_itself_allowed(name: str) -> None:
    limit = 2.0**40
    assert run(name, limit, largest=limit)[0] is False
    assert run(name, -limit, largest=limit)[0] is False
    assert run(name, 2 * limit, scale=0.5, largest=limit)[0] is False
    assert run(name, limit, scale=2.0, largest=limit)[0] is True
    assert run(name, 1.0000001 * limit, largest=limit)[0] is True


@each_case
def test_an_element_above_the_limit_is_treated_as_one_that_is_not_finite(name: str) -> None:
    """To the bit, in everything that a kernel writes; but a dense packet has the number."""
    _, limited = run(name, 1e12, largest=1e11)
    _, infinite = run(name, NAN)
    for key, argument in infinite.items():
        if isinstance(argument, Tensor) and key not in ("grad", "packets" if name == "dense_encode" else ""):
            assert torch.equal(allocation(limited[key]), allocation(argument)), key
    if name == "dense_encode":
        (byte,) = limited["runs"][:, 3].tolist()
        assert limited["packets"][byte : byte + 800].view(torch.float32)[70] == 1e12


def test_there_is_something_to_compare() -> None:
    assert ISAS

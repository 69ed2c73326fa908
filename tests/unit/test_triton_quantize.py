"""Quantised blocks on GPUs: Triton kernels equal the reference to the bit, as in test_triton_sign."""

from __future__ import annotations

import pytest
import torch

from tests.unit.formulas import Places
from tests.unit.kernel_cases import WORD, copy_of, each_grad, guarded, hard_gradient, random, random_bytes
from tests.unit.quantize_cases import (
    Options,
    a_case_of_each,
    each_block,
    each_out,
    each_residual,
    each_rounding,
    quantize_decode_case,
    quantize_encode_case,
    quantize_merge_case,
)
from tests.unit.sign_cases import GRADIENTS
from tests.unit.test_triton_sign import TILE, arithmetic, each_scale, same_on_triton

pytestmark = arithmetic

FEW = (1, 63, 65, TILE + 130)
"""Less than a block, all of a word but its end, a word and its beginning, and more than a tile."""
NOT_FINITE = [torch.nan, torch.inf, -torch.inf, 2.0**60]


# What a worker sends -------------------------------------------------------------------------------------------------


@each_rounding
@each_block
@each_residual
@each_grad
def test_quantize_encode_for_every_tail(
    grad_dtype: torch.dtype | None, state_dtype: torch.dtype | None, rounding: Options, block: int
) -> None:
    for seed, count in enumerate(FEW):
        case = quantize_encode_case(
            count,
            seed=seed,
            grad_dtype=grad_dtype,
            state_dtype=state_dtype,
            pieces=1 + seed % 3,
            shift=WORD * (seed % 5 > 0),
            grad_off=seed,
            block=block,
            **rounding,
        )
        assert same_on_triton("quantize_encode", case) is False


@each_rounding
@each_residual
@each_scale
@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
def test_quantize_encode_with_gradients_that_are_not_finite(
    grad_dtype: torch.dtype, state_dtype: torch.dtype | None, on_device: bool, rounding: Options
) -> None:
    of: Options = {"grad_dtype": grad_dtype, "state_dtype": state_dtype, "finite": False, "grad_off": 3, "scale": 0.3}
    case = quantize_encode_case(TILE + 70, seed=7, pieces=2, **of, **rounding)
    assert same_on_triton("quantize_encode", case, scale_on_device=on_device) is True


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("count", [1, 100, TILE])
def test_one_element_that_is_not_finite_is_enough(count: int, value: float) -> None:
    """Its gradient is left out. What stands behind the last gradient does not matter."""
    case = quantize_encode_case(count, seed=1)
    behind = case["grad"].as_strided((1,), (1,), case["grad"].storage_offset() + count)
    behind.fill_(torch.nan)
    assert same_on_triton("quantize_encode", case) is False
    case["grad"][-1], case["residual"][Places(case["runs"]).element[-1]] = value, 0.5
    assert same_on_triton("quantize_encode", case) is True


@each_rounding
@each_block
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_residual_that_is_not_finite_becomes_zero(state_dtype: torch.dtype, rounding: Options, block: int) -> None:
    """With a gradient and without one."""
    case = quantize_encode_case(300, seed=1, state_dtype=state_dtype, pieces=3, shift=WORD, block=block, **rounding)
    here = Places(case["runs"]).element - WORD
    case["residual"][here] = hard_gradient(300, state_dtype, random(0), finite=False)
    without: Options = {name: copy_of(argument) for name, argument in case.items()} | {"grad": None}
    for one in (case, without):
        assert same_on_triton("quantize_encode", one) is True
        assert bool(one["residual"][here].isfinite().all())


@each_rounding
@each_block
def test_elements_of_all_magnitudes(rounding: Options, block: int) -> None:
    """Blocks of numbers below the smallest scale and of the largest numbers, a block of zeros, and all in one block."""
    exponents = torch.arange(-149, 60, 8).float().repeat_interleave(WORD)
    c = torch.randn(exponents.numel(), generator=random(2)).clamp(-1, 1) * torch.exp2(exponents)
    c[::3] = 0.0
    mixed = c[torch.randperm(c.numel(), generator=random(3))[: 4 * WORD]]
    c = torch.cat([torch.zeros(WORD), c, mixed])
    case = quantize_encode_case(c.numel(), seed=1, block=block, **rounding) | {
        "grad": guarded(c),
        "residual": None,
    }
    assert same_on_triton("quantize_encode", case) is False


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_random_numbers_beyond_element_2_to_32(bits: int) -> None:
    """Their key depends on the upper half of an element: a tile has elements of both."""
    case = quantize_encode_case(10 * WORD, seed=0, bits=bits, stochastic=True, state_dtype=None)
    case["grad"] = guarded(torch.randn(10 * WORD, generator=random(4)))
    near = copy_of(case["runs"])
    case["runs"][:, 0] = 2**32 - 3 * WORD
    same_on_triton("quantize_encode", case)
    far = case["packets"].clone()
    same_on_triton("quantize_encode", case | {"runs": near})
    assert not torch.equal(case["packets"], far)


# What an owner answers, and what becomes of it -----------------------------------------------------------------------


@each_rounding
@each_block
@each_residual
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_quantize_merge_for_every_tail(
    state_dtype: torch.dtype | None, workers: int, rounding: Options, block: int
) -> None:
    for seed, count in enumerate(FEW):
        case = quantize_merge_case(
            count,
            seed=seed,
            workers=workers,
            state_dtype=state_dtype,
            pieces=1 + seed % 3,
            shift=WORD * (seed % 5 > 0),
            block=block,
            **rounding,
        )
        same_on_triton("quantize_merge", case)


@each_rounding
@each_block
@each_residual
def test_quantize_merge_of_any_bytes(state_dtype: torch.dtype | None, rounding: Options, block: int) -> None:
    """Scales that are NaN, infinite, negative or huge: the residual stays finite."""
    case = quantize_merge_case(500, seed=1, state_dtype=state_dtype, pieces=2, block=block, **rounding)
    case["rows"].copy_(random_bytes(*case["rows"].shape, generator=random(5)))
    same_on_triton("quantize_merge", case)
    if state_dtype is not None:
        assert bool(case["residual"][Places(case["runs"]).element].isfinite().all())


@each_rounding
@each_block
@each_out
def test_quantize_decode_for_every_tail(out_dtype: torch.dtype, rounding: Options, block: int) -> None:
    for seed, count in enumerate(FEW):
        case = quantize_decode_case(
            count,
            seed=seed,
            out_dtype=out_dtype,
            weight=0.7,
            pieces=1 + seed % 3,
            block=block,
            **rounding,
        )
        same_on_triton("quantize_decode", case)


@pytest.mark.parametrize("operation", ["quantize_encode", "quantize_merge", "quantize_decode"])
def test_no_runs_are_nothing_to_do(operation: str) -> None:
    same_on_triton(operation, a_case_of_each(70)[operation] | {"runs": torch.zeros(0, 6, dtype=torch.int64)})

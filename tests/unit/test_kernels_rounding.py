"""Native conversions between fp32 and the two 16-bit formats are torch's, for every number where they could differ.

The kernels convert inside their loops, so the conversions are reached through what they do: a master that rounds to
its parameter is left alone, one that does not is replaced by the parameter, and a state of bfloat16 with `beta = 0` is
the rounded gradient.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.kernel_cases import each_backend, kernels_of, random

each_low = pytest.mark.parametrize("low_dtype", [torch.bfloat16, torch.float16], ids=str)


def all_halves(dtype: torch.dtype) -> Tensor:
    return torch.arange(-32768, 32768, dtype=torch.int16).view(dtype)


def fp32_from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def tricky_floats(dtype: torch.dtype) -> Tensor:
    """Every finite half, the middle between it and the next one (a tie), a hair to either side; the overflow; noise."""
    halves = all_halves(dtype).float()
    halves = halves[halves.isfinite()]
    step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # of the subnormal numbers
    spacing = torch.where(
        halves.abs() < torch.finfo(dtype).smallest_normal,
        step,
        torch.exp2(torch.floor(torch.log2(halves.abs().double()))) * torch.finfo(dtype).eps,
    )
    ties = (halves.double() + spacing.double() / 2).float()
    infinity = torch.tensor(float("inf"))
    near_ties = [torch.nextafter(ties, infinity), torch.nextafter(ties, -infinity)]
    noise = fp32_from_bits(torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=random(0)))
    largest = torch.finfo(dtype).max * (1 + torch.finfo(dtype).eps / torch.tensor([2.0, 4.0, 8.0]).double())
    smallest = fp32_from_bits(torch.arange(0, 300))
    corners = torch.cat([largest.float(), infinity[None], smallest])
    every = torch.cat([halves, ties, *near_ties, noise, corners, -corners])
    return every[~every.isnan()]


def apply_without_moving(backend: str, x: Tensor, low: Tensor, *, active: bool) -> None:
    """A step with lr = 0 and no decay: all that is left of it is the care for masters."""
    words = -(-x.numel() // 64)
    with kernels_of(backend) as kernels:
        kernels.birder_apply(
            torch.tensor([[0, 0, x.numel(), 0, 0, 0]]),
            x,
            low,
            torch.full((words,), -1 if active else 0),
            torch.zeros(8 * words, dtype=torch.uint8),
            planes=1,
            workers=0,
            lr=0.0,
            decay=1.0,
        )


def same_bits(a: Tensor, b: Tensor) -> bool:
    whole = torch.int16 if a.element_size() == 2 else torch.int32
    return torch.equal(a.view(whole), b.view(whole))


@each_low
def test_the_tricky_numbers_are_tricky(low_dtype: torch.dtype) -> None:
    """They hold ties, numbers that overflow and numbers that vanish; otherwise the tests below would prove little."""
    x = tricky_floats(low_dtype)
    rounded = x.to(low_dtype).double()
    error = (rounded - x.double()).abs()
    finite = rounded.isfinite() & x.isfinite()
    up = torch.nextafter(x, torch.tensor(float("inf"))).to(low_dtype).double()
    down = torch.nextafter(x, torch.tensor(float("-inf"))).to(low_dtype).double()
    assert int((finite & (error > 0) & (up != down)).sum()) > 50_000
    assert bool((rounded.isinf() & x.isfinite()).any())
    assert bool(((rounded == 0) & (x != 0)).any())


@each_backend
@each_low
def test_a_master_that_rounds_to_its_parameter_stays(backend: str, low_dtype: torch.dtype) -> None:
    """If a kernel rounded one number in another way than torch, it would replace that master by its parameter."""
    x = tricky_floats(low_dtype)
    low = x.to(low_dtype)
    x_before, low_before = x.clone(), low.clone()
    apply_without_moving(backend, x, low, active=False)
    assert same_bits(x, x_before)
    assert same_bits(low, low_before)


@each_backend
@each_low
def test_masters_of_active_coordinates_are_rounded_as_torch_rounds(backend: str, low_dtype: torch.dtype) -> None:
    x = tricky_floats(low_dtype)
    x = x[x != 0]  # adding the move of -0 turns a zero of one sign into the other
    low = x.to(low_dtype)
    x_before = x.clone()
    apply_without_moving(backend, x, low, active=True)
    assert same_bits(x, x_before)
    assert same_bits(low, x_before.to(low_dtype))


@each_backend
@each_low
def test_a_loaded_parameter_replaces_its_master(backend: str, low_dtype: torch.dtype) -> None:
    """For all 65536 halves: the master becomes the half, and the half is what it was."""
    low = all_halves(low_dtype)
    elsewhere = torch.where(low.float() == 1000.0, -1000.0, 1000.0)
    x, loaded = elsewhere.clone(), low.clone()
    apply_without_moving(backend, x, loaded, active=False)
    number = ~low.isnan()
    assert same_bits(x[number], low.float()[number])
    assert same_bits(loaded[number], low[number])
    assert bool(x[~number].isnan().all())
    assert bool(loaded[~number].isnan().all())


@each_backend
def test_masters_that_are_not_numbers_stay_so(backend: str) -> None:
    """Which NaN it is may differ between backends; that it is one may not."""
    for low_dtype in (torch.bfloat16, torch.float16):
        x = fp32_from_bits(torch.tensor([0x7F800001, 0x7FC00000, -1, -8388607, 0x7FFFFFFF]))
        low = x.to(low_dtype)
        apply_without_moving(backend, x, low, active=True)
        assert bool(x.isnan().all())
        assert bool(low.isnan().all())


@each_backend
def test_a_bfloat16_state_is_rounded_as_torch_rounds(backend: str) -> None:
    gradient = tricky_floats(torch.bfloat16)
    gradient = gradient[gradient.to(torch.bfloat16).isfinite()]
    size = -(-gradient.numel() // 64) * 64
    m, b = torch.zeros(size, dtype=torch.bfloat16), torch.zeros(size, dtype=torch.bfloat16)
    with kernels_of(backend) as kernels:
        kernels.birder_encode(
            torch.tensor([[0, 0, gradient.numel(), 0, 0, 0]]),
            gradient,
            m,
            b,
            torch.zeros(size // 64, dtype=torch.int64),
            torch.zeros(size // 8, dtype=torch.uint8),
            beta=0.0,
            eps=0.0,
            scale=1.0,
            amsgrad=False,
            key=0,
        )
    rounded = (gradient + 0.0).to(torch.bfloat16)  # m is a sum, and -0 + 0 is 0
    assert same_bits(m[: gradient.numel()], rounded)
    assert same_bits(b[: gradient.numel()], rounded.abs())

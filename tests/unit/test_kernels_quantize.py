"""Quantised blocks: every native kernel equals the reference to the bit, and the reference the oracle and its laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles import quantize as oracle
from tests.unit.kernel_cases import REFERENCE, WORD, each_backend, each_grad, kernels_of, random, same_everywhere
from tests.unit.quantize_cases import (
    each_block,
    each_format,
    each_out,
    each_residual,
    quantize_decode_case,
    quantize_encode_case,
    quantize_merge_case,
)
from thinwire.kernels import ops
from thinwire.kernels.bounds import quantized_word_bytes

TAILS = (1, 65, 2048 + 100)
each_levels = pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])


@each_format
@each_residual
@each_grad
def test_encode_for_every_tail(
    state_dtype: torch.dtype | None, grad_dtype: torch.dtype | None, form: dict[str, Any]
) -> None:
    for seed, count in enumerate(TAILS):
        case = quantize_encode_case(
            count, seed=seed, state_dtype=state_dtype, grad_dtype=grad_dtype, pieces=1 + seed % 3, grad_off=seed, **form
        )
        assert same_everywhere("quantize_encode", **case) is False


@each_format
@each_residual
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_merge_for_every_tail(state_dtype: torch.dtype | None, workers: int, form: dict[str, Any]) -> None:
    for seed, count in enumerate(TAILS):
        case = quantize_merge_case(count, seed=seed, workers=workers, state_dtype=state_dtype, **form)
        same_everywhere("quantize_merge", **case)


@each_format
@each_out
def test_decode_for_every_tail(out_dtype: torch.dtype, form: dict[str, Any]) -> None:
    for seed, count in enumerate(TAILS):
        case = quantize_decode_case(count, seed=seed, out_dtype=out_dtype, weight=0.7, pieces=1 + seed % 3, **form)
        same_everywhere("quantize_decode", **case)


@each_format
@each_residual
def test_gradients_that_are_not_finite_are_left_out(state_dtype: torch.dtype | None, form: dict[str, Any]) -> None:
    """Without sums: those of a step that is skipped do not matter, but can be asked for or not."""
    case = quantize_encode_case(1000, seed=1, state_dtype=state_dtype, finite=False, with_sums=False, **form)
    assert same_everywhere("quantize_encode", **case) is True
    if state_dtype is not None:
        first = WORD  # the word of seed 1
        assert bool(case["residual"][first : first + 1000].isfinite().all())


def test_a_residual_that_is_not_finite_becomes_zero() -> None:
    case = quantize_encode_case(WORD, seed=0)
    case["residual"][3], case["residual"][5], case["grad"][3] = torch.inf, 1e30, torch.nan
    assert same_everywhere("quantize_encode", **case) is True
    assert bool(case["residual"].isfinite().all())


def encoded(c: torch.Tensor, **form: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The packet of `c`, by the reference, and its values."""
    packet = torch.zeros(-(-c.numel() // WORD) * quantized_word_bytes(form["bits"], form["block"]), dtype=torch.uint8)
    runs = torch.tensor([[0, 0, c.numel(), 0, 0, 0]])
    rule = {"sums": None, "spread": 1.3, "scale": 1.0, "shift": 0}
    REFERENCE.quantize_encode(runs, c, None, packet, **rule, **form)
    values = torch.zeros_like(c)
    form.pop("key", None)
    REFERENCE.quantize_decode(runs, packet, values, **form, weight=1.0)
    return packet, values


def difficult(count: int, seed: int) -> torch.Tensor:
    generator = random(seed)
    c = torch.randn(count, generator=generator)
    return c * 10.0 ** torch.randint(-40, 9, (count,), generator=generator).float()


@each_levels
@each_block
@pytest.mark.parametrize("count", [1, 63, 64, 300])
def test_the_reference_is_the_oracle(bits: int, block: int, count: int) -> None:
    c = difficult(count, seed=count)
    packet, values = encoded(c, bits=bits, block=block)
    codes, scales, expected = oracle.encode(c.numpy(), bits, block, 1.3)
    np.testing.assert_array_equal(values.numpy(), expected)
    size = quantized_word_bytes(bits, block)
    for word in range(count // WORD):
        here, blocks = slice(word * WORD, (word + 1) * WORD), slice(word * WORD // block, (word + 1) * WORD // block)
        assert packet[word * size :][:size].numpy().tobytes() == oracle.packed(codes[here], scales[blocks], bits, block)


@each_levels
@each_block
def test_every_block_contracts(bits: int, block: int) -> None:
    """With what error feedback needs: what is left of a block is smaller than the block."""
    c = torch.randn(200 * WORD, generator=random(bits))
    c[: 10 * WORD] = 0
    _, values = encoded(c, bits=bits, block=block)
    before, after = (x.double().view(-1, block).square().sum(1) for x in (c, c - values))
    assert bool((after < before)[before > 0].all())
    assert bool((values.view(-1, block)[before == 0] == 0).all())


@pytest.mark.parametrize("bits", [3, 4, 8])
@each_block
def test_an_error_is_at_most_half_a_level(bits: int, block: int) -> None:
    """The largest element can be further off by what the scale was rounded down."""
    c = torch.randn(100 * WORD, generator=random(0))
    _, values = encoded(c, bits=bits, block=block)
    _, scales, _ = oracle.encode(c.numpy(), bits, block, 1.3)
    half = torch.from_numpy(scales).repeat_interleave(block) / 2
    assert bool(((c - values).abs() <= half * (1 + 1e-6)).all())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_stochastic_values_are_unbiased(bits: int) -> None:
    """The mean of n draws is within 6 standard deviations, each at most s / 2 / sqrt(n), for all of 640 elements: this
    fails by chance with a probability below 2e-6. The keys are fixed, so that it fails always or never."""
    c, n = torch.randn(10 * WORD, generator=random(1)), 400
    mean = sum((encoded(c, bits=bits, block=32, stochastic=True, key=k)[1].double() for k in range(n)), start=0.0) / n
    top = 2 ** (bits - 1) - 1
    scale = c.view(-1, 32).abs().amax(1).double().repeat_interleave(32) / top * (1 + 2**-7)
    assert bool(((mean - c).abs() <= 6 * scale / 2 / n**0.5).all())


@each_backend
def test_random_numbers_depend_on_key_and_element_alone(backend: str) -> None:
    whole = quantize_encode_case(500, seed=0, stochastic=True)
    parts = quantize_encode_case(500, seed=0, stochastic=True, pieces=3)
    other = quantize_encode_case(500, seed=0, stochastic=True, key=1)
    with kernels_of(backend) as kernels:
        for case in (whole, parts, other):
            kernels.quantize_encode(**case)
    assert torch.equal(whole["residual"][:500], parts["residual"][:500])
    assert not torch.equal(whole["residual"][:500], other["residual"][:500])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"bits": 5}, "quantize_encode: bits=5: expected one of 1, 2, 3, 4, 8"),
        ({"block": 48}, "quantize_encode: block=48: expected one of 16, 32, 64"),
        ({"bits": 1, "stochastic": True}, "stochastic=True with bits=1: expected at least 2 bits"),
        ({"spread": 0.0}, "quantize_encode: spread=0.0: expected a number above 0"),
        ({"spread": float("nan")}, "quantize_encode: spread=nan: expected a number above 0"),
        ({"packets": torch.zeros(30, dtype=torch.uint8)}, "quantize_encode: packets is torch.uint8 of shape"),
        ({"shift": 128}, "quantize_encode: shift=128: expected at most"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ops.BACKENDS["native"].quantize_encode(**(quantize_encode_case(64, seed=0) | changes))

"""Kernels with all arguments but one given: the same bits as ordinary calls, and the same checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire.kernels import native, ops
from thinwire.kernels.bounds import quantized_word_bytes

BACKENDS = ["reference", *(["native"] if native.available() else [])]
COUNT = 200
WORDS = -(-COUNT // 64)


def arguments(bits: int) -> dict[str, Any]:
    return {
        "runs": torch.tensor([[0, 0, COUNT, 0, 0, 0]]),
        "residual": torch.zeros(64 * WORDS),
        "packets": torch.zeros(WORDS * quantized_word_bytes(bits, 64), dtype=torch.uint8),
        "sums": torch.zeros(1, 2, dtype=torch.float64),
        "bits": bits,
        "block": 64,
        "spread": 1.5,
        "scale": 1.0,
        "shift": 0,
    }


def gradients(count: int = COUNT) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2 * count, generator=generator)
    infinite = torch.randn(count, generator=generator)
    infinite[7] = torch.inf
    return [wide[:count], wide[count:], wide[:count].to(torch.bfloat16), infinite, wide[count:].to(torch.float16)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [1, 4])
def test_prepared_calls_give_the_bits_of_ordinary_calls(backend: str, bits: int) -> None:
    kernels, ordinary, given = ops.BACKENDS[backend], arguments(bits), arguments(bits)
    prepared = kernels.prepared("quantize_encode", "grad", **given)
    found = []
    for grad in gradients():
        expected = kernels.quantize_encode(**ordinary, grad=grad)
        found.append(prepared(grad))
        assert found[-1] is expected
        for name in ("residual", "packets", "sums"):
            assert torch.equal(given[name], ordinary[name]), name
    assert found == [False, False, False, True, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_prepared_decoding_writes_into_each_tensor_that_it_is_given(backend: str) -> None:
    kernels, given = ops.BACKENDS[backend], arguments(4)
    kernels.quantize_encode(**given, grad=gradients()[0])
    decoding = {"runs": given["runs"], "packets": given["packets"], "weight": 0.5, "bits": 4, "block": 64}
    expected = torch.zeros(COUNT)
    kernels.quantize_decode(**decoding, out=expected)
    prepared = kernels.prepared("quantize_decode", "out", **decoding)
    for _ in range(3):
        out = torch.full((COUNT,), torch.nan)
        prepared(out)
        assert torch.equal(out, expected)


@pytest.mark.skipif(not native.available(), reason="the reference checks nothing, and there are no native kernels")
def test_prepared_calls_refuse_what_ordinary_calls_refuse() -> None:
    prepared = ops.BACKENDS["native"].prepared("quantize_encode", "grad", **arguments(4))
    prepared(gradients()[0])
    for wrong in (torch.zeros(COUNT - 1), torch.zeros(COUNT, dtype=torch.float64), torch.zeros(2 * COUNT)[::2]):
        with pytest.raises((TypeError, ValueError), match="quantize_encode: grad is"):
            prepared(wrong)
    with pytest.raises(ValueError, match="negative bit"):
        prepared(torch.zeros(COUNT, dtype=torch.complex64).conj().imag)
    freed = torch.zeros(COUNT)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="its memory freed"):
        prepared(freed)

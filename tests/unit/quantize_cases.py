"""Cases for the kernels of quantised blocks, as in kernel_cases."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.kernel_cases import REFERENCE, WORD, guarded, hard_gradient, random, random_bytes
from tests.unit.sign_cases import empty_sums, first_word_of, gradient, in_flat, moderate
from thinwire.kernels.bounds import quantized_word_bytes

Options = dict[str, Any]
ROUNDINGS: list[Options] = [
    {"bits": bits, "stochastic": stochastic}
    for bits in (1, 2, 3, 4, 8)
    for stochastic in (False, True)
    if bits > 1 or not stochastic
]
BLOCKS = [16, 32, 64]
FORMATS: list[Options] = [{**rounding, "block": block} for rounding in ROUNDINGS for block in BLOCKS]


def _name(options: Options) -> str:
    return "-".join(str(value) for value in options.values())


each_rounding = pytest.mark.parametrize("rounding", ROUNDINGS, ids=_name)
each_block = pytest.mark.parametrize("block", BLOCKS)
each_format = pytest.mark.parametrize("form", FORMATS, ids=_name)
"""Roundings and blocks as one mark: the short suite has all of them."""
each_residual = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, None], ids=str)
each_out = pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def runs_of(count: int, pieces: int, first_word: int, word_bytes: int) -> tuple[Tensor, int]:
    """A run table with gaps of odd numbers of words in packets, and the size of the packets."""
    words = -(-count // WORD)
    edges = sorted({words * (i * i) // (pieces * pieces) for i in range(pieces + 1)})
    runs: list[list[int]] = []
    byte = 6
    for start, stop in pairwise(edges):
        elements = min(stop * WORD, count) - start * WORD
        runs.append([(first_word + start) * WORD, start * WORD, elements, byte, 0, 1])
        byte += (stop - start) * word_bytes + 10
    return torch.tensor(runs), byte - 10


def quantize_encode_case(
    count: int,
    *,
    seed: int,
    bits: int = 4,
    block: int = 64,
    stochastic: bool = False,
    grad_dtype: torch.dtype | None = torch.float32,
    state_dtype: torch.dtype | None = torch.float32,
    pieces: int = 1,
    shift: int = 0,
    finite: bool = True,
    grad_off: int = 0,
    with_sums: bool = True,
    **changes: Any,
) -> dict[str, Any]:
    generator, first_word = random(seed), first_word_of(seed)
    runs, size = runs_of(count, pieces, first_word, quantized_word_bytes(bits, block))
    residual = None
    if state_dtype is not None:
        residual = guarded(in_flat(moderate(count, generator, state_dtype), first_word)[shift:])
    return {
        "runs": runs,
        "grad": gradient(count, grad_dtype, generator, finite=finite, elements_off=grad_off),
        "residual": residual,
        "packets": guarded(random_bytes(size, generator=generator)),
        "sums": empty_sums(len(runs), 2) if with_sums else None,
        "bits": bits,
        "block": block,
        "spread": 2.0 if bits == 1 else 1.3,
        "scale": 1.0,
        "shift": shift,
        "stochastic": stochastic,
        "key": 0xFEDCBA9876543210 + seed,
        **changes,
    }


def packets_of(count: int, rows: int, *, seed: int, **options: Any) -> tuple[Tensor, Tensor]:
    """A run table, and so many packets with its values."""
    packets: list[Tensor] = []
    case: dict[str, Any] = {}
    for row in range(rows):
        case = quantize_encode_case(count, seed=seed, state_dtype=None, **options)
        case["grad"] = hard_gradient(count, torch.float32, random(100 * seed + row)).clamp(-1e9, 1e9)
        REFERENCE.quantize_encode(**case)
        packets.append(case["packets"])
    return case["runs"], guarded(torch.stack(packets))


def quantize_merge_case(
    count: int,
    *,
    seed: int,
    workers: int = 3,
    state_dtype: torch.dtype | None = torch.float32,
    shift: int = 0,
    **options: Any,
) -> dict[str, Any]:
    runs, rows = packets_of(count, workers, seed=seed, **options)
    answer = quantize_encode_case(count, seed=seed, state_dtype=state_dtype, shift=shift, **options)
    named = ("residual", "bits", "block", "spread", "shift", "stochastic", "key")
    return {"runs": runs, "rows": rows, "answer": answer["packets"]} | {name: answer[name] for name in named}


def quantize_decode_case(
    count: int, *, seed: int, out_dtype: torch.dtype = torch.float32, weight: float = 1.0, **options: Any
) -> dict[str, Any]:
    runs, rows = packets_of(count, 1, seed=seed, **options)
    out = guarded(torch.full((count,), 7.0, dtype=out_dtype))
    form = quantize_encode_case(1, seed=seed, **options)
    named = ("bits", "block", "stochastic")
    return {"runs": runs, "packets": rows[0], "out": out, "weight": weight} | {name: form[name] for name in named}


def a_case_of_each(count: int) -> dict[str, dict[str, Any]]:
    return {
        "quantize_encode": quantize_encode_case(count, seed=3, state_dtype=torch.bfloat16, shift=WORD),
        "quantize_merge": quantize_merge_case(count, seed=3, state_dtype=torch.bfloat16, shift=WORD),
        "quantize_decode": quantize_decode_case(count, seed=3, out_dtype=torch.float16, weight=0.5),
    }

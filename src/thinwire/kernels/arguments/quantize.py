"""Tensors and formats of kernels of quantised blocks."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels.arguments._parts import BYTES, shifted
from thinwire.kernels.bounds import (
    F64,
    GRADIENTS,
    STATES,
    U8,
    Bounds,
    Device,
    bounds_of,
    need,
    need_dense,
    need_one_of,
    need_rows,
    quantized_word_bytes,
)

BITS = (1, 2, 3, 4, 8)
BLOCKS = (16, 32, 64)
LARGEST_SPREAD = 1024.0
"""It keeps scales finite."""


def quantize_encode(
    runs: Tensor,
    grad: Tensor | None,
    residual: Tensor | None,
    packets: Tensor,
    sums: Tensor | None,
    bits: int,
    block: int,
    spread: float,
    shift: int,
    stochastic: bool,
    device: Device = None,
) -> Bounds:
    """Check the arguments of `quantize_encode`."""
    word_bytes = _format("quantize_encode", bits, block, stochastic)
    _spread("quantize_encode", spread)
    bounds = bounds_of("quantize_encode", runs)
    if grad is not None:
        need_dense("quantize_encode", "grad", grad, GRADIENTS, bounds.param, device)
    _residual("quantize_encode", bounds, residual, shift, device)
    need("quantize_encode", "packets", packets, U8, bounds.packed(word_bytes), device)
    if sums is not None:
        need("quantize_encode", "sums", sums, F64, 2 * bounds.rows, device)
    return bounds


def quantize_merge(
    runs: Tensor,
    rows: Tensor,
    residual: Tensor | None,
    answer: Tensor,
    bits: int,
    block: int,
    spread: float,
    shift: int,
    stochastic: bool,
    device: Device = None,
) -> Bounds:
    """Check the arguments of `quantize_merge`."""
    word_bytes = _format("quantize_merge", bits, block, stochastic)
    _spread("quantize_merge", spread)
    bounds = bounds_of("quantize_merge", runs)
    need_rows("quantize_merge", "rows", rows, BYTES, 1, bounds.packed(word_bytes), device)
    _residual("quantize_merge", bounds, residual, shift, device)
    need("quantize_merge", "answer", answer, U8, bounds.packed(word_bytes), device)
    return bounds


def quantize_decode(
    runs: Tensor,
    packets: Tensor,
    out: Tensor,
    bits: int,
    block: int,
    stochastic: bool,
    device: Device = None,
) -> Bounds:
    """Check the arguments of `quantize_decode`."""
    word_bytes = _format("quantize_decode", bits, block, stochastic)
    bounds = bounds_of("quantize_decode", runs)
    need("quantize_decode", "packets", packets, U8, bounds.packed(word_bytes), device)
    need_dense("quantize_decode", "out", out, GRADIENTS, bounds.param, device)
    return bounds


def _format(kernel: str, bits: int, block: int, stochastic: bool) -> int:
    """Check the format of words, and return their bytes."""
    if bits not in BITS:
        raise ValueError(f"{kernel}: bits={bits}: expected one of {', '.join(map(str, BITS))}")
    if block not in BLOCKS:
        raise ValueError(f"{kernel}: block={block}: expected one of {', '.join(map(str, BLOCKS))}")
    if stochastic and bits == 1:
        raise ValueError(f"{kernel}: stochastic=True with bits=1: expected at least 2 bits, as zero must be a level")
    return quantized_word_bytes(bits, block)


def _spread(kernel: str, spread: float) -> None:
    if not 0 < spread <= LARGEST_SPREAD:
        raise ValueError(f"{kernel}: spread={spread}: expected a number above 0 and at most {LARGEST_SPREAD:g}")


def _residual(kernel: str, bounds: Bounds, residual: Tensor | None, shift: int, device: Device) -> None:
    if residual is not None:
        shifted(kernel, bounds, shift)
        need_one_of(kernel, "residual", residual, STATES, bounds.elements - shift, device)

"""Tensors of kernels of scaled signs, with error feedback and with Markov compression."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels.arguments._parts import BYTES, anchored, given, parameter, shifted
from thinwire.kernels.bounds import (
    F32,
    F64,
    GRADIENTS,
    I64,
    STATES,
    U8,
    Bounds,
    Device,
    bounds_of,
    need,
    need_dense,
    need_one_of,
    need_rows,
    words_of,
)
from thinwire.kernels.modes import Output


def sign_encode(
    runs: Tensor,
    grad: Tensor | None,
    c: Tensor,
    answer_words: Tensor,
    packets: Tensor,
    sent_scales: Tensor,
    answer_scales: Tensor,
    sums: Tensor,
    shift: int,
    device: Device = None,
) -> Bounds:
    """Check the tensors of `sign_encode`."""
    bounds = bounds_of("sign_encode", runs)
    shifted("sign_encode", bounds, shift)
    if grad is not None:
        need_dense("sign_encode", "grad", grad, GRADIENTS, bounds.param, device)
    need_one_of("sign_encode", "c", c, STATES, bounds.elements - shift, device)
    need("sign_encode", "answer_words", answer_words, I64, bounds.words, device)
    need("sign_encode", "packets", packets, U8, bounds.bits(), device)
    need("sign_encode", "sent_scales", sent_scales, F32, bounds.shards, device)
    need("sign_encode", "answer_scales", answer_scales, F32, bounds.shards, device)
    need("sign_encode", "sums", sums, F64, bounds.rows, device)
    return bounds


def sign_merge(
    runs: Tensor,
    rows: Tensor,
    y: Tensor,
    answer: Tensor,
    scales: Tensor,
    last_scales: Tensor,
    sums: Tensor,
    shift: int,
    device: Device = None,
) -> Bounds:
    """Check the tensors of `sign_merge`."""
    bounds = bounds_of("sign_merge", runs)
    shifted("sign_merge", bounds, shift)
    need_rows("sign_merge", "rows", rows, BYTES, 1, bounds.bits(), device)
    need_one_of("sign_merge", "y", y, STATES, bounds.elements - shift, device)
    need("sign_merge", "answer", answer, U8, bounds.bits(), device)
    need_rows("sign_merge", "scales", scales, (F32,), rows.shape[0], bounds.shards, device)
    need("sign_merge", "last_scales", last_scales, F32, bounds.shards, device)
    need("sign_merge", "sums", sums, F64, bounds.rows, device)
    return bounds


def sign_apply(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    p: Tensor,
    answer_words: Tensor,
    scales: Tensor,
    anchor: Tensor | None,
    m: Tensor | None,
    device: Device = None,
) -> Bounds:
    """Check the tensors of `sign_apply`."""
    bounds = bounds_of("sign_apply", runs)
    parameter("sign_apply", bounds, x, low, device)
    anchored("sign_apply", bounds, anchor, x, device)
    need("sign_apply", "p", p, F32, bounds.elements, device)
    need("sign_apply", "answer_words", answer_words, I64, bounds.words, device)
    need("sign_apply", "scales", scales, F32, bounds.shards, device)
    if m is not None:
        need("sign_apply", "m", m, F32, bounds.elements, device)
    return bounds


def momentum_encode(
    runs: Tensor,
    grad: Tensor | None,
    m: Tensor,
    c: Tensor,
    packets: Tensor | None,
    sent_scales: Tensor,
    sums: Tensor | None,
    shift: int,
    output: int,
    device: Device = None,
) -> Bounds:
    """Check the tensors of `momentum_encode`."""
    bounds = bounds_of("momentum_encode", runs)
    shifted("momentum_encode", bounds, shift)
    if grad is not None:
        need_dense("momentum_encode", "grad", grad, GRADIENTS, bounds.param, device)
    need("momentum_encode", "m", m, F32, bounds.elements, device)
    need_one_of("momentum_encode", "c", c, STATES, bounds.elements - shift, device)
    need("momentum_encode", "sent_scales", sent_scales, F32, bounds.shards, device)
    if output != Output.NOTHING:
        length = bounds.bits() if output == Output.SIGNS else bounds.floats
        need("momentum_encode", "packets", given("momentum_encode", "packets", packets), U8, length, device)
    if output == Output.SIGNS:
        need("momentum_encode", "sums", given("momentum_encode", "sums", sums), F64, bounds.rows, device)
    return bounds


def markov_encode(
    runs: Tensor,
    grad: Tensor | None,
    m: Tensor | None,
    known: Tensor,
    sent_words: Tensor,
    nonzero: Tensor,
    sent_mask: Tensor,
    active: Tensor,
    packets: Tensor,
    sent_scales: Tensor,
    sums: Tensor,
    shift: int,
    device: Device = None,
) -> Bounds:
    """Check the tensors of `markov_encode`."""
    bounds = bounds_of("markov_encode", runs)
    shifted("markov_encode", bounds, shift)
    own_words = words_of(bounds.whole - shift)
    _markov("markov_encode", bounds, grad, m, known, shift, device)
    need("markov_encode", "sent_words", sent_words, I64, own_words, device)
    need("markov_encode", "nonzero", nonzero, U8, own_words, device)
    need("markov_encode", "sent_mask", sent_mask, I64, bounds.words, device)
    need("markov_encode", "active", active, I64, bounds.words, device)
    need("markov_encode", "packets", packets, U8, bounds.bits(), device)
    need("markov_encode", "sent_scales", sent_scales, F32, bounds.shards, device)
    need("markov_encode", "sums", sums, F64, 3 * bounds.rows, device)
    return bounds


def _markov(
    kernel: str, bounds: Bounds, grad: Tensor | None, m: Tensor | None, known: Tensor, shift: int, device: Device
) -> None:
    shifted(kernel, bounds, shift)
    if grad is not None:
        need_dense(kernel, "grad", grad, GRADIENTS, bounds.param, device)
    if m is not None:
        need(kernel, "m", m, F32, bounds.elements - shift, device)
    need(kernel, "known", known, F32, bounds.elements - shift, device)


def markov_difference(
    runs: Tensor,
    grad: Tensor | None,
    m: Tensor | None,
    known: Tensor,
    c: Tensor,
    shift: int,
    device: Device = None,
) -> Bounds:
    """Check the tensors of `markov_difference`."""
    bounds = bounds_of("markov_difference", runs)
    _markov("markov_difference", bounds, grad, m, known, shift, device)
    need("markov_difference", "c", c, F32, bounds.elements - shift, device)
    return bounds


def markov_merge(
    runs: Tensor,
    rows: Tensor,
    mean: Tensor,
    g: Tensor,
    active: Tensor,
    answer: Tensor,
    scales: Tensor,
    sums: Tensor,
    shift: int,
    device: Device = None,
) -> Bounds:
    """Check the tensors of `markov_merge`."""
    bounds = bounds_of("markov_merge", runs)
    shifted("markov_merge", bounds, shift)
    need_rows("markov_merge", "rows", rows, BYTES, 1, bounds.bits(), device)
    need("markov_merge", "mean", mean, F32, bounds.elements - shift, device)
    need("markov_merge", "g", g, F32, bounds.elements, device)
    need("markov_merge", "active", active, I64, bounds.words, device)
    need("markov_merge", "answer", answer, U8, bounds.bits(), device)
    need("markov_merge", "scales", scales, F32, rows.shape[0], device)
    need("markov_merge", "sums", sums, F64, 3 * bounds.rows, device)
    return bounds

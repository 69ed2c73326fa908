"""The kernels of floats that travel as they are."""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.modes import LARGEST
from thinwire.kernels.triton.common import (
    WORDS,
    device_of,
    floats_of,
    has_tile,
    inside,
    jit,
    launch,
    need_on_device,
    number,
    number_at,
    report,
    run_at,
    runs_on,
    tile,
    widen,
)

_TOGETHER = 1024
"""Elements of a mean that a program is for."""


@jit(do_not_specialize=["scale", "largest"])
def _dense_encode(
    runs, grad, packets, bad, scale, largest, HAS_GRAD: tl.constexpr, ON_DEVICE: tl.constexpr, WORDS: tl.constexpr
):
    _, in_param, count, byte, _, _ = run_at(runs, tl.program_id(1))
    _, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask = inside(offset, count, full)
            g = tl.zeros((WORDS, 64), dtype=tl.float32)
            if HAS_GRAD:
                g = widen(tl.load(grad + in_param + offset, mask=mask, other=0.0)) * number_at(scale, ON_DEVICE)
                report(bad, ((tl.abs(g) <= largest) == 0) & mask)
            tl.store(floats_of(packets, byte) + offset, g, mask=mask)


def dense_encode(
    runs: Tensor, grad: Tensor | None, packets: Tensor, *, scale: float | Tensor, largest: float = LARGEST, bad: Tensor
) -> None:
    """See the reference."""
    device = device_of("dense_encode", "packets", packets)
    arguments.dense_encode(runs, grad, packets, device)
    need_on_device("dense_encode", device, bad=bad, scale=scale)
    table, grid = runs_on(device, runs)
    factor, on_device = number(scale)
    launch(
        _dense_encode, grid, packets,
        table, grad, packets, bad, factor, float(largest),
        HAS_GRAD=grad is not None, ON_DEVICE=on_device, WORDS=WORDS,
    )  # fmt: skip


@jit(do_not_specialize=["n", "share"])
def _mean(rows, stride, n, count, out, share, TOGETHER: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    mask = at < count
    total = widen(tl.load(rows + at, mask=mask, other=0.0))
    for row in range(1, n):
        total += widen(tl.load(rows + tl.cast(row, tl.int64) * stride + at, mask=mask, other=0.0))
    result = total * share
    overflown = (tl.abs(result) < float("inf")) == 0
    if tl.max(overflown.to(tl.int32), axis=0) != 0:
        shares = widen(tl.load(rows + at, mask=mask, other=0.0)) * share
        for row in range(1, n):
            shares += widen(tl.load(rows + tl.cast(row, tl.int64) * stride + at, mask=mask, other=0.0)) * share
        result = tl.where(overflown, shares, result)
    tl.store(out + at, result, mask=mask)


def mean(rows: Tensor, out: Tensor) -> None:
    """See the reference."""
    device = device_of("mean", "out", out)
    arguments.mean(rows, out, device)
    n, count = rows.shape
    launch(
        _mean, (triton.cdiv(count, _TOGETHER),), out,
        rows, rows.stride(0), n, count, out, 1.0 / n,
        TOGETHER=_TOGETHER,
    )  # fmt: skip

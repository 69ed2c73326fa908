"""The kernels of Adam's dense steps; see the reference."""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.modes import Gate
from thinwire.kernels.triton.common import (
    WORDS,
    add_up,
    blocks_of,
    count_if_open,
    device_of,
    floats_of,
    gate_of,
    has_tile,
    inside,
    jit,
    launch,
    load_master,
    need_on_device,
    room_for_sums,
    run_at,
    runs_on,
    signed,
    store_master,
    sum_of,
    tile,
    unpack,
    write_sum,
)


@triton.jit
def average(m, g, beta, rest):
    """A moving average that takes in `g`; `rest` is one less `beta`, rounded once."""
    return m * beta + g * rest


@triton.jit
def average_square(v, g, beta, rest):
    """A moving average that takes in the square of `g`."""
    return v * beta + (g * rest) * g


@jit(do_not_specialize=["beta1", "rest1", "beta2", "rest2", "eps", "rate", "correction", "decay", "parameter"])
def _adam_apply(
    runs, x, low, m, v, gradient, scales, sums, room,
    beta1, rest1, beta2, rest2, eps, rate, correction, decay, gate, parameter,
    HAS_LOW: tl.constexpr, BY_SIGN: tl.constexpr, UPDATE: tl.constexpr, GATED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    element, in_param, count, byte, _, shard = run_at(runs, tl.program_id(1))
    steps = count_if_open(count, gate, parameter, GATED) > 0
    sums += tl.program_id(1).to(tl.int64) * room
    word, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask, word_mask = inside(offset, count, full), inside(word * 64, count, full)
            here, at = element + offset, in_param + offset
            variance = tl.load(v + here, mask=mask, other=0.0)
            if steps:
                if BY_SIGN:
                    up = unpack(tl.load(gradient + element // 64 + word, mask=word_mask, other=0))
                    g = signed(up, tl.load(scales + shard))
                else:
                    g = tl.load(floats_of(gradient, byte) + offset, mask=mask, other=0.0)
                momentum = average(tl.load(m + here, mask=mask, other=0.0), g, beta1, rest1)
                tl.store(m + here, momentum, mask=mask)
                if UPDATE:
                    variance = average_square(variance, g, beta2, rest2)
                    tl.store(v + here, variance, mask=mask)
                old = load_master(x, low, at, mask, HAS_LOW)
                step = tl.div_rn(momentum * rate, tl.sqrt_rn(variance) * correction + eps)
                store_master(x, low, at, mask, tl.where(variance > 0, old * decay - step, old), HAS_LOW)
            write_sum(sums, tl.where(mask, variance, 0.0), WORDS)


def adam_apply(
    runs: Tensor,
    x: Tensor,
    low: Tensor | None,
    m: Tensor,
    v: Tensor,
    gradient: Tensor,
    scales: Tensor | None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    rate: float,
    correction: float,
    decay: float,
    update_variance: bool,
    gate: Gate | None = None,
) -> Tensor:
    """See the reference; the sum stays on the device. Behind a closed gate it is that of the variances as they are."""
    device = device_of("adam_apply", "x", x)
    arguments.adam_apply(runs, x, low, m, v, gradient, scales, device)
    need_on_device("adam_apply", device, gate=gate)
    table, grid = runs_on(device, runs)
    by_tile = room_for_sums(grid, x.device)
    opens, parameter, gated = gate_of(gate)
    launch(
        _adam_apply, grid, x,
        table, x, low, m, v, gradient, scales, by_tile, by_tile.shape[-1],
        float(beta1), 1.0 - beta1, float(beta2), 1.0 - beta2, float(eps), float(rate), float(correction), float(decay),
        opens, parameter,
        HAS_LOW=low is not None, BY_SIGN=scales is not None, UPDATE=update_variance, GATED=gated, WORDS=WORDS,
    )  # fmt: skip
    by_run = torch.empty(runs.shape[0], dtype=torch.float64, device=x.device)
    add_up(table, by_tile, by_run)
    return by_run[0] if runs.shape[0] == 1 else sum_of(by_run)


@jit(do_not_specialize=["count", "correction", "floor", "eps"])
def _precondition(v, count, correction, floor, eps, WORDS: tl.constexpr):
    _, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask = inside(offset, count, full)
            variance = tl.load(v + offset, mask=mask, other=0.0)
            root = tl.sqrt_rn(variance) * correction
            factor = tl.div_rn(1.0, tl.where(root < floor, floor, root) + eps)
            tl.store(v + offset, tl.where(variance > 0, factor, 0.0), mask=mask)


def precondition(v: Tensor, *, correction: float, floor: float, eps: float) -> None:
    """See the reference."""
    device = device_of("precondition", "v", v)
    arguments.precondition(v, device)
    grid = (blocks_of(v.numel()),)
    launch(_precondition, grid, v, v, v.numel(), float(correction), float(floor), float(eps), WORDS=WORDS)

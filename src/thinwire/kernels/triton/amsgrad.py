"""AMSGrad's dense steps, and SketchedAMSGrad's local rule; see the reference."""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton.language as tl
from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.modes import LARGEST, Gate
from thinwire.kernels.triton.adam import average, average_square
from thinwire.kernels.triton.common import (
    LIMIT,
    WORDS,
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
    number,
    number_at,
    report,
    run_at,
    runs_on,
    signed,
    store_master,
    tile,
    unpack,
    widen,
    words_of,
)


@jit(do_not_specialize=["beta1", "rest1", "beta2", "rest2", "eps", "rate", "correction", "decay", "parameter"])
def _amsgrad_apply(
    runs, x, low, g, m, v, peak, packets, scales, active,
    beta1, rest1, beta2, rest2, eps, rate, correction, decay, gate, parameter,
    HAS_X: tl.constexpr, HAS_LOW: tl.constexpr, SOURCE: tl.constexpr, GATED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    element, in_param, count, byte, _, shard = run_at(runs, tl.program_id(1))
    steps = count_if_open(count, gate, parameter, GATED) > 0
    word, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask, word_mask = inside(offset, count, full), inside(word * 64, count, full)
            here, at = element + offset, in_param + offset
            if SOURCE == 2:
                gradient = tl.load(floats_of(packets, byte) + offset, mask=mask, other=0.0)
            else:
                gradient = tl.load(g + here, mask=mask, other=0.0)
            if SOURCE == 1:
                up = unpack(tl.load(words_of(packets, byte) + word, mask=word_mask, other=0))
                is_active = unpack(tl.load(active + element // 64 + word, mask=word_mask, other=0))
                gradient = tl.where(is_active, gradient + signed(up, tl.load(scales + shard)), gradient)
                tl.store(g + here, gradient, mask=mask)
            if HAS_X:  # noqa: SIM102 (the compiler leaves out what follows; the other is only known when it runs)
                if steps:
                    momentum = average(tl.load(m + here, mask=mask, other=0.0), gradient, beta1, rest1)
                    tl.store(m + here, momentum, mask=mask)
                    variance = average_square(tl.load(v + here, mask=mask, other=0.0), gradient, beta2, rest2)
                    tl.store(v + here, variance, mask=mask)
                    largest = tl.load(peak + here, mask=mask, other=0.0)
                    largest = tl.where(variance > largest, variance, largest)
                    tl.store(peak + here, largest, mask=mask)
                    old = load_master(x, low, at, mask, HAS_LOW)
                    step = tl.div_rn(momentum * rate, tl.sqrt_rn(largest) * correction + eps)
                    store_master(x, low, at, mask, tl.where(largest > 0, old * decay - step, old), HAS_LOW)


def amsgrad_apply(
    runs: Tensor,
    x: Tensor | None,
    low: Tensor | None,
    g: Tensor | None,
    m: Tensor | None,
    v: Tensor | None,
    peak: Tensor | None,
    packets: Tensor | None,
    scales: Tensor | None,
    active: Tensor | None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    rate: float,
    correction: float,
    decay: float,
    source: int,
    gate: Gate | None = None,
) -> None:
    """See the reference. With a closed gate it works as without `x`: the gradient follows the answer."""
    on = packets if g is None else g
    assert on is not None
    device = device_of("amsgrad_apply", "packets" if g is None else "g", on)
    arguments.amsgrad_apply(runs, x, low, g, m, v, peak, packets, scales, active, source, device)
    need_on_device("amsgrad_apply", device, gate=gate)
    table, grid = runs_on(device, runs)
    opens, parameter, gated = gate_of(gate)
    launch(
        _amsgrad_apply, grid, on,
        table, x, low, g, m, v, peak, packets, scales, active,
        float(beta1), 1.0 - beta1, float(beta2), 1.0 - beta2, float(eps), float(rate), float(correction), float(decay),
        opens, parameter,
        HAS_X=x is not None, HAS_LOW=low is not None, SOURCE=int(source), GATED=gated, WORDS=WORDS,
    )  # fmt: skip


@jit(do_not_specialize=["beta", "weight", "scale", "ratio", "largest"])
def _momentum_sum(
    runs, grad, m, e, g, bad, beta, weight, scale, ratio, largest, shift,
    HAS_GRAD: tl.constexpr, ON_DEVICE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    element, in_param, count, _, _, _ = run_at(runs, tl.program_id(1))
    _, offset = tile(WORDS)
    for full in tl.static_range(2):
        if has_tile(count, full, WORDS):
            mask = inside(offset, count, full)
            at = element - shift + offset
            gradient = tl.zeros(mask.shape, dtype=tl.float32)
            if HAS_GRAD:
                gradient = widen(tl.load(grad + in_param + offset, mask=mask, other=0.0)) * number_at(scale, ON_DEVICE)
            momentum, error = tl.load(m + at, mask=mask, other=0.0), tl.load(e + at, mask=mask, other=0.0)
            new = momentum * beta + gradient * weight
            total = new + error * ratio
            fit = (tl.abs(new) < LIMIT) & (tl.abs(total) < LIMIT) & (tl.abs(gradient) <= largest)
            tl.store(m + at, tl.where(fit, new, momentum), mask=mask)
            tl.store(e + at, tl.where(fit, total, error), mask=mask)
            tl.store(g + at, tl.where(fit, gradient, 0.0), mask=mask)
            report(bad, (fit == 0) & mask)


def momentum_sum(
    runs: Tensor,
    grad: Tensor | None,
    m: Tensor,
    e: Tensor,
    g: Tensor,
    *,
    beta: float,
    weight: float,
    scale: float | Tensor,
    ratio: float,
    shift: int,
    largest: float = LARGEST,
    bad: Tensor,
) -> None:
    """See the reference."""
    device = device_of("momentum_sum", "m", m)
    arguments.momentum_sum(runs, grad, m, e, g, shift, device)
    need_on_device("momentum_sum", device, bad=bad, scale=scale)
    table, grid = runs_on(device, runs)
    factor, on_device = number(scale)
    launch(
        _momentum_sum, grid, m,
        table, grad, m, e, g, bad, float(beta), float(weight), factor, float(ratio), float(largest), shift,
        HAS_GRAD=grad is not None, ON_DEVICE=on_device, WORDS=WORDS,
    )  # fmt: skip

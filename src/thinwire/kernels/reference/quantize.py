"""The kernels of quantised blocks: a few bits per element, one scale per block, and the rounding errors as residual.

A *word* of 64 elements has `64 / block` scales, bfloat16, and then the codes of its elements; see docs/protocol.md.
With `bits >= 3` the levels are the scale times the integers from -L to L, and the scale is the block's largest
magnitude divided by L. With `bits <= 2` the levels have no zero: they are the scale times ±1/2, and ±3/2 with two bits;
the scale is `spread` times the block's mean magnitude. `stochastic` rounds at random, such that the expected value is
the element; two bits then are the three levels -1, 0 and 1 times the largest magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels import rng
from thinwire.kernels.bounds import quantized_word_bytes
from thinwire.kernels.reference.words import Run, by_halves, each_run, flat, float32, guarded, padded, run_sum

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
"""The bits of a code in the order of a packet, lowest first. A plane of `p` bits takes `8 p` bytes per word, and byte
`j` has the bits of the elements `j`, `j + 8 p`, `j + 16 p`, ..."""
SMALLEST = 2.0**-120
"""A smaller scale is zero: the inverses of the others are finite."""


@dataclass(frozen=True)
class Quantizer:
    """How blocks become scales and codes, and how these become values."""

    bits: int
    block: int
    stochastic: bool
    spread: float = 1.0
    key: int = 0

    @property
    def has_zero(self) -> bool:
        """Whether zero is a level."""
        return self.bits > 2 or self.stochastic

    @property
    def top(self) -> int:
        """The largest level, where zero is one."""
        return 2 ** (self.bits - 1) - 1

    def encode(self, run: Run, c: Tensor, packet: Tensor) -> Tensor:
        """Write the scales and the codes of a run, and return the values that they stand for."""
        words = padded(c).view(-1, 64 // self.block, self.block)
        scales = self._scales(words, run.count)
        codes = self._codes(run, words, scales)
        here = run.bytes_in(packet, quantized_word_bytes(self.bits, self.block))
        split = 2 * (64 // self.block)
        # A clone, because strides of empty tensors may be 0, which torch does not view in another dtype.
        here[:, :split] = scales.to(torch.bfloat16).clone(memory_format=torch.contiguous_format).view(torch.uint8)
        here[:, split:] = _pack(codes.view(-1, 64), self.bits)
        return self._values(codes, scales)[: run.count]

    def decode(self, run: Run, packet: Tensor) -> Tensor:
        """The values of a run in a packet."""
        here = run.bytes_in(packet, quantized_word_bytes(self.bits, self.block))
        split = 2 * (64 // self.block)
        scales = here[:, :split].clone(memory_format=torch.contiguous_format).view(torch.bfloat16).to(torch.float32)
        codes = _unpack(here[:, split:], self.bits).view(-1, 64 // self.block, self.block)
        return self._values(codes, scales)[: run.count]

    def _scales(self, words: Tensor, count: int) -> Tensor:
        size = words.abs()
        if self.has_zero:
            largest = size.amax(2)
            raw = largest / torch.full_like(largest, self.top)  # a tensor: GPUs multiply by the inverse of a number
        else:
            sums = by_halves(size.view(-1), self.block).view(size.shape[:2])
            first = torch.arange(0, size.numel(), self.block, device=size.device).view_as(sums)
            raw = sums / (count - first).clamp(1, self.block).to(torch.float32) * float32(self.spread)
        if self.stochastic:  # up: a smaller one would clamp the largest element
            rounded = ((raw.view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)
        else:
            rounded = raw.to(torch.bfloat16).to(torch.float32)
        return torch.where(raw < SMALLEST, 0.0, rounded)

    def _codes(self, run: Run, words: Tensor, scales: Tensor) -> Tensor:
        inverse = torch.where(scales > 0, torch.ones_like(scales) / scales, 0.0)
        x = words * inverse[:, :, None]
        if not self.has_zero:
            half = 2 ** (self.bits - 1)
            return (x.floor() + half).clamp(0, 2 * half - 1).to(torch.int32)
        if self.stochastic:
            elements = torch.arange(run.element, run.element + x.numel(), device=x.device)
            level = (x + rng.fraction(self.key, elements).view_as(x)).floor()
        else:
            level = x.round()
        return level.clamp(-self.top, self.top).to(torch.int32) + self.top

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        zero = self.top if self.has_zero else (2**self.bits - 1) / 2
        return ((codes.to(torch.float32) - zero) * scales[:, :, None]).view(-1)


def quantize_encode(
    runs: Tensor,
    grad: Tensor | None,
    residual: Tensor | None,
    packets: Tensor,
    *,
    sums: Tensor | None,
    bits: int,
    block: int,
    spread: float,
    scale: float,
    shift: int,
    stochastic: bool = False,
    key: int = 0,
) -> bool:
    """Quantise `c`, the residual plus the gradient times `scale`, and keep what the values leave of it.

    Without a gradient or a residual (None) it is zero. `residual` has the element `e` of the flat space at `e - shift`.
    An element whose gradient would make `c` NaN or too large does not take it, and the result is True; a residual that
    is NaN or too large itself becomes zero. `sums`, if any, gets each run's sums of the squares of `c`, and of what is
    left of it. `stochastic` rounds at random, with numbers that depend on `key` and the element.
    """
    quantizer = Quantizer(bits, block, stochastic, spread, key)
    nonfinite = False
    for i, run in enumerate(each_run(runs)):
        before = _residual(run, residual, shift, packets.device)
        wish = before if grad is None else before + flat(grad)[run.of_param].to(torch.float32) * scale
        c, bad = _bounded(wish, before)
        nonfinite |= bad
        rest = c - quantizer.encode(run, c, packets)
        if residual is not None:
            residual[run.of_flat(shift)] = rest.to(residual.dtype)
        if sums is not None:
            sums[i, 0], sums[i, 1] = run_sum(c * c), run_sum(rest * rest)
    return nonfinite


def quantize_merge(
    runs: Tensor,
    rows: Tensor,
    residual: Tensor | None,
    answer: Tensor,
    *,
    bits: int,
    block: int,
    spread: float,
    shift: int,
    stochastic: bool = False,
    key: int = 0,
) -> None:
    """Quantise the mean of the workers' values plus the residual, and keep what the answer's values leave of it.

    The runs belong to one shard, and their bytes count from the start of a packet. `rows` is `(n, packet)`. `residual`
    is as in `quantize_encode`; an element whose sum is NaN or too large is its residual alone.
    """
    quantizer = Quantizer(bits, block, stochastic, spread, key)
    share = float32(1.0) / rows.shape[0]
    for run in each_run(runs):
        total = quantizer.decode(run, rows[0])
        for row in rows[1:]:
            total = total + quantizer.decode(run, row)
        before = _residual(run, residual, shift, rows.device)
        y, _ = _bounded(total * share + before, before)
        rest = y - quantizer.encode(run, y, answer)
        if residual is not None:
            residual[run.of_flat(shift)] = rest.to(residual.dtype)


def quantize_decode(
    runs: Tensor,
    packets: Tensor,
    out: Tensor,
    *,
    bits: int,
    block: int,
    weight: float,
    stochastic: bool = False,
) -> None:
    """Write the values of a packet, times `weight`, to the elements of a parameter or gradient."""
    quantizer = Quantizer(bits, block, stochastic)
    for run in each_run(runs):
        flat(out)[run.of_param] = (quantizer.decode(run, packets) * weight).to(out.dtype)


def _residual(run: Run, residual: Tensor | None, shift: int, device: torch.device) -> Tensor:
    if residual is None:
        return torch.zeros(run.count, device=device)
    return residual[run.of_flat(shift)].to(torch.float32)


def _bounded(wish: Tensor, before: Tensor) -> tuple[Tensor, bool]:
    """`wish`, but `before` where that is NaN or too large, and zero where both are."""
    return guarded(wish, guarded(before, torch.zeros_like(before))[0])


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes, a row of 64 per word, as bytes."""
    planes: list[Tensor] = []
    for width in PLANES[bits]:
        shifts = torch.arange(0, 8, width, device=codes.device)[:, None]
        parts = (codes & (2**width - 1)).view(-1, 8 // width, 8 * width)
        planes.append((parts << shifts).sum(1))
        codes = codes >> width
    return torch.cat(planes, 1).to(torch.uint8)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """The codes of bytes, a row per word."""
    codes = torch.zeros(packed.shape[0], 64, dtype=torch.int32, device=packed.device)
    done = 0
    for width in PLANES[bits]:
        shifts = torch.arange(0, 8, width, device=packed.device)[:, None]
        plane = packed[:, 8 * done : 8 * (done + width)].to(torch.int32)
        parts = (plane[:, None, :] >> shifts) & (2**width - 1)
        codes |= parts.view(-1, 64).to(torch.int32) << done
        done += width
    return codes

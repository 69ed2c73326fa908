"""What all Triton kernels share: runs, bits in words, random numbers, sums in a fixed order, masters, and launching.

A program works on WORDS words of one run: a tile of `(WORDS, 64)` elements, whose word `w` is row `w`. The grid is
`(blocks of the longest run, runs)`; programs beyond the end of their run have nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

WORD = tl.constexpr(64)
WORDS = 32
"""Words of a tile: 2,048 elements, 16 a thread."""
_RUN_FIELDS = 6

_tables: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Run tables are made on the host, once; here are the copies of them that kernels read."""


def runs_on(device: torch.device, runs: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """A run table as kernels on `device` read it, and the grid for it; copied there the first time only."""
    known: dict[torch.device, tuple[Tensor, tuple[int, int]]] = _tables.setdefault(runs, {})
    if device not in known:
        longest = int(runs[:, 2].max()) if runs.shape[0] else 0
        known[device] = (runs.to(device), (blocks_of(longest), runs.shape[0]))
    return known[device]


def blocks_of(elements: int) -> int:
    """How many tiles so many elements take."""
    return triton.cdiv(elements, WORDS * WORD.value)


def launch(kernel: Any, grid: tuple[int, ...], on: Tensor, *args: Any, **constants: Any) -> None:
    """Run a kernel on the device of `on`, on its current stream; no products and sums are fused, nowhere."""
    if all(grid):
        where = torch.cuda.device(on.device) if on.device.type == "cuda" else nullcontext()
        with where:
            kernel[grid](*args, **constants, enable_fp_fusion=False)


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit` that types pyright can live with."""
    return triton.jit(**options)


# Runs and bits --------------------------------------------------------------------------------------------------------


@triton.jit
def run_at(runs, number):
    """The fields of a run. All but the shard and the count are multiples of 64 elements, or of 8 bytes."""
    run = runs + 6 * number
    element = tl.multiple_of(tl.load(run), 64)
    in_param = tl.multiple_of(tl.load(run + 1), 64)
    byte = tl.multiple_of(tl.load(run + 3), 4)
    return element, in_param, tl.load(run + 2), byte, tl.multiple_of(tl.load(run + 4), 8), tl.load(run + 5)


@triton.jit
def tile(WORDS: tl.constexpr):
    """The words of this program, `(WORDS,)`, and its elements, `(WORDS, 64)`, counted from the start of its run."""
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    return word, word[:, None] * 64 + tl.arange(0, 64)[None, :]


@triton.jit
def words_of(packets, byte):
    """A pointer to words, at a byte of a buffer."""
    return (packets + byte).to(tl.pointer_type(tl.int64))


@triton.jit
def floats_of(packets, byte):
    """A pointer to floats, at a byte of a buffer."""
    return (packets + byte).to(tl.pointer_type(tl.float32))


@triton.jit
def unpack(words):
    """The bools of words: a row each."""
    return ((words[:, None] >> tl.arange(0, 64)[None, :].to(tl.int64)) & 1) != 0


@triton.jit
def pack(bits):
    """Bools, a row a word, as words."""
    return tl.sum(bits.to(tl.int64) << tl.arange(0, 64)[None, :].to(tl.int64), axis=1)


@triton.jit
def signed(positive, scale):
    """`scale` where `positive`, else `-scale`."""
    return tl.where(positive, scale, -scale)


@triton.jit
def number_at(value, ON_DEVICE: tl.constexpr):
    """A float32 that is an argument, or stands in memory because no host knows it yet."""
    return tl.load(value) if ON_DEVICE else value


# Random numbers -------------------------------------------------------------------------------------------------------


@triton.jit
def _splitmix(z):
    z = z + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def draw(key, elements):
    """32 random bits for each of the elements, `(WORDS, 64)` with whole words as rows; see `thinwire.kernels.rng`."""
    # Elements of a word agree in all but their last six bits.
    high = tl.min(elements, axis=1).to(tl.uint64) >> 32
    k = _splitmix(key.to(tl.uint64) + high)
    x = elements.to(tl.uint32) ^ k.to(tl.uint32)[:, None]
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x + (k >> 32).to(tl.uint32)[:, None]
    x = x * 0x846CA68B
    x = x ^ (x >> 16)
    x = x * 0x9E3779B1
    return x ^ (x >> 15)


@triton.jit
def uniform(key, elements):
    """float32 in [-1, 1) with 24 bits, one an element."""
    return (draw(key, elements).to(tl.int32, bitcast=True) >> 8).to(tl.float32) * 1.1920928955078125e-07


# Sums -----------------------------------------------------------------------------------------------------------------


@triton.jit
def word_sums(values, WORDS: tl.constexpr):
    """The sum of each row, by halves: sums of two have no order, so this one is the same everywhere."""
    for half in tl.static_range(6):
        values = tl.sum(tl.reshape(values, (WORDS, 2, 32 >> half)), axis=1)
    return tl.reshape(values, (WORDS,))


@triton.jit
def _add_up(runs, words, sums, room, SUMS: tl.constexpr):
    run = tl.program_id(0)
    count = tl.load(runs + 6 * run + 2)
    for i in tl.static_range(SUMS):
        total = tl.zeros((), dtype=tl.float64)
        start = words + (run * SUMS + i) * room
        for word in range(0, (count + 63) // 64):
            total += tl.load(start + word).to(tl.float64)
        tl.store(sums + run * SUMS + i, total)


def add_up(runs: Tensor, words: Tensor, sums: Tensor) -> None:
    """Turn the sums of words, `(runs, sums, words)` in float32, into those of runs: in double, in the order of words."""
    launch(_add_up, (runs.shape[0],), sums, runs, words, sums, words.shape[-1], SUMS=words.shape[1])


def room_for_sums(grid: tuple[int, int], device: torch.device, each: int = 1) -> Tensor:
    """Memory for the sums of the words of all runs, `each` a word."""
    return torch.empty((grid[1], each, grid[0] * WORDS), dtype=torch.float32, device=device)


# Masters --------------------------------------------------------------------------------------------------------------


@triton.jit
def take_over(x, low, at, mask, HAS_LOW: tl.constexpr):
    """The elements of a parameter, or of the master of `low`, replaced by it where they no longer round to it."""
    wide = tl.load(x + at, mask=mask, other=0.0)
    if HAS_LOW:
        narrow = tl.load(low + at, mask=mask, other=0.0)
        same = wide.to(narrow.dtype).to(tl.int16, bitcast=True) == narrow.to(tl.int16, bitcast=True)
        wide = tl.where(same, wide, narrow.to(tl.float32))
    return wide


@triton.jit
def hand_back(x, low, at, mask, value, HAS_LOW: tl.constexpr):
    """Store the elements of a parameter, and round them to the one whose master it is."""
    tl.store(x + at, value, mask=mask)
    if HAS_LOW:
        tl.store(low + at, value.to(low.dtype.element_ty), mask=mask)

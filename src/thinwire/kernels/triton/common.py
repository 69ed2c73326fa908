"""What all Triton kernels share: runs, bits in words, random numbers, sums in a fixed order, masters, and launching.

A program works on WORDS words of one run: a tile of `(WORDS, 64)` elements, whose word `w` is row `w`. The grid is
`(blocks of the longest run, runs)`; programs beyond the end of their run have nothing to do.
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from thinwire._torch_compat import write_count
from thinwire.kernels.bounds import bounds_of, need
from thinwire.kernels.modes import Gate

WORD = tl.constexpr(64)
WORDS = 32
"""Words of a tile: 2,048 elements, 16 a thread. Sums are defined by it, in all backends."""
LIMIT = tl.constexpr(2.0**60)
"""See the reference of signs: memories stay below it."""

_tables: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Tables are made on the host, once; here are the copies of them that kernels read."""


def table_on(device: torch.device, table: Tensor) -> Tensor:
    """A table as kernels on `device` read it; copied there the first time, and when it was written to since."""
    if table.device == device:
        return table
    if table not in _tables:
        _tables[table] = {}
    known: dict[torch.device, tuple[int, Tensor]] = _tables[table]
    version = -1 if table.is_inference() else write_count(table)
    if device not in known or known[device][0] != version or version < 0:
        known[device] = version, table.to(device)
    return known[device][1]


def runs_on(device: torch.device, runs: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """A run table as kernels on `device` read it, and the grid for it."""
    bounds = bounds_of("runs_on", runs)
    return table_on(device, runs), (blocks_of(bounds.longest), bounds.rows)


def device_of(kernel: str, name: str, tensor: Tensor) -> torch.device:
    """The device that a kernel runs on, which is that of one of its tensors: a GPU, or interpreted the CPU."""
    if tensor.device.type not in ("cuda", "cpu"):
        raise ValueError(f"{kernel}: {name} is on {tensor.device}: expected a tensor on 'cuda' or 'cpu'")
    return tensor.device


def need_on_device(
    kernel: str,
    device: torch.device,
    *,
    bad: Tensor | None = None,
    gate: Gate | None = None,
    scale: float | Tensor = 1.0,
) -> None:
    """Check the tensors that only kernels take for which the host does not wait."""
    if bad is not None:
        need(kernel, "bad", bad, torch.int32, 1, device)
    if gate is not None:
        need(kernel, "gate", gate.open, torch.int32, gate.parameter + 1, device)
    if isinstance(scale, Tensor):
        need(kernel, "scale", scale, torch.float32, 1, device)


def blocks_of(elements: int) -> int:
    """How many tiles so many elements take."""
    return triton.cdiv(elements, WORDS * WORD.value)


def launch(kernel: Any, grid: tuple[int, ...], on: Tensor, *args: Any, **constants: Any) -> None:
    """Run a kernel on the device of `on`, on its current stream; no products and sums are fused, nowhere."""
    if all(grid):
        where = torch.cuda.device(on.device) if on.device.type == "cuda" else nullcontext()
        with where:
            kernel[grid](*args, **constants, enable_fp_fusion=False)


def number(value: float | Tensor) -> tuple[float | Tensor, bool]:
    """The arguments of `number_at`."""
    return (value, True) if isinstance(value, Tensor) else (float(value), False)


def key_of(key: int) -> int:
    """A key of 64 bits as kernels take it, with a sign: they are compiled for int64 then, whatever the key is."""
    return key - (key >> 63 << 64)


def gate_of(gate: Gate | None) -> tuple[Tensor | None, int, bool]:
    """The arguments of `count_if_open`."""
    return (None, 0, False) if gate is None else (gate.open, gate.parameter, True)


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
def has_tile(count, FULL: tl.constexpr, WORDS: tl.constexpr):
    """Whether this program has a FULL tile of a run of so many elements, which needs no masks; or the run's last."""
    start = tl.program_id(0).to(tl.int64) * (WORDS * 64)
    return start + WORDS * 64 <= count if FULL else (start < count) & (start + WORDS * 64 > count)


@triton.jit
def inside(elements, count, FULL: tl.constexpr):
    """Which elements are of a run; of a FULL tile all, which the compiler sees, and then loads four at once."""
    return tl.full(elements.shape, True, tl.int1) if FULL else elements < count


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
    """`scale` where `positive`, else `-scale`; by a product, as Triton before 3.8 takes `-x` for `0 - x`."""
    return tl.where(positive, scale, scale * -1.0)


@triton.jit
def number_at(value, ON_DEVICE: tl.constexpr):
    """A float32 that is an argument, or stands in memory because no host knows it yet."""
    return tl.load(value) if ON_DEVICE else value


@triton.jit
def count_if_open(count, gate, parameter, GATED: tl.constexpr):
    """The elements of a run, or 0 where the parameter's gate is closed: a program has nothing to do then."""
    return tl.where(tl.load(gate + parameter) != 0, count, 0) if GATED else count


@triton.jit
def report(bad, wrong):
    """Raise the lowest bit of `bad` if anything of a tile is wrong."""
    tl.atomic_or(bad, 1, mask=tl.max(tl.max(wrong.to(tl.int32), axis=1), axis=0) != 0, sem="relaxed")


# Numbers of other types: bfloat16 by its bits, as Triton's interpreter neither rounds to it nor knows its subnormals


@triton.jit
def widen(values):
    """Numbers of any type as float32."""
    if values.dtype == tl.bfloat16:
        wide = (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = values.to(tl.float32)
    return wide


@triton.jit
def narrow(values, to):
    """float32 as what stands at the pointer `to`, rounded to the nearest and then to even."""
    if to.dtype.element_ty == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        low = tl.where(values == values, even, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        low = values.to(to.dtype.element_ty)
    return low


# Random numbers -------------------------------------------------------------------------------------------------------


@triton.jit
def splitmix(z):
    """See `thinwire.kernels.rng`."""
    z = z + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def draw(key, first, elements):
    """32 random bits for each of the elements, of which `first` is the lowest; see `thinwire.kernels.rng`."""
    # Keys depend on the upper half of an element, of which a tile has seen two at most.
    high = first.to(tl.uint64) >> 32
    here, beyond = splitmix(key.to(tl.uint64) + high), splitmix(key.to(tl.uint64) + high + 1)
    crossed = (elements.to(tl.uint64) >> 32) != high
    x = elements.to(tl.uint32) ^ tl.where(crossed, beyond.to(tl.uint32), here.to(tl.uint32))
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x + tl.where(crossed, (beyond >> 32).to(tl.uint32), (here >> 32).to(tl.uint32))
    x = x * 0x846CA68B
    x = x ^ (x >> 16)
    x = x * 0x9E3779B1
    return x ^ (x >> 15)


@triton.jit
def uniform(key, first, elements):
    """float32 in [-1, 1) with 24 bits, one an element."""
    return (draw(key, first, elements).to(tl.int32, bitcast=True) >> 8).to(tl.float32) * 1.1920928955078125e-07


# Sums -----------------------------------------------------------------------------------------------------------------


@triton.jit
def word_sums(values, WORDS: tl.constexpr):
    """The sum of each row, by halves: sums of two have no order, so this one is the same everywhere."""
    for half in tl.static_range(6):
        values = tl.sum(tl.reshape(values, (WORDS, 2, 32 >> half)), axis=1)
    return tl.reshape(values, (WORDS,))


@triton.jit
def write_sum(sums, values, WORDS: tl.constexpr):
    """Store the sum of this program's tile among those of its run: its words, which are 32, by halves in double."""
    words = word_sums(values, WORDS).to(tl.float64)
    for half in tl.static_range(5):
        words = tl.sum(tl.reshape(words, (2, 16 >> half)), axis=0)
    tl.store(sums + tl.program_id(0) + tl.arange(0, 1), words)


@triton.jit
def in_order(numbers, count):
    """The sum of so many doubles in their order; 32 are loaded at a time, as each addition waits."""
    total = tl.zeros((), dtype=tl.float64)
    for first in range(0, count, 32):
        for i in tl.static_range(32):
            total += tl.load(numbers + first + i, mask=first + i < count, other=0.0)
    return total


@triton.jit
def tiles_to_sum(runs, tiles, room, WORDS: tl.constexpr):
    """The numbers of the tiles of this program's run, for its sum of them, and how many; the grid is `(runs, sums)`."""
    run, each = tl.program_id(0), tl.num_programs(1)
    count = tl.load(runs + 6 * run + 2)
    return tiles + (run * each + tl.program_id(1)).to(tl.int64) * room, tl.cdiv(count, 64 * WORDS)


@triton.jit
def _add_up(runs, tiles, sums, room, WORDS: tl.constexpr):
    numbers, count = tiles_to_sum(runs, tiles, room, WORDS)
    to = sums + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(to, in_order(numbers, count))


def add_up(runs: Tensor, tiles: Tensor, sums: Tensor) -> None:
    """Turn the sums of tiles, `(runs, sums, tiles)`, into those of runs, in their order."""
    grid = (tiles.shape[0], tiles.shape[1])
    launch(_add_up, grid, sums, runs, tiles, sums, tiles.shape[2], WORDS=WORDS, num_warps=1)


@jit(do_not_specialize=["count"])
def _sum_of(numbers, count, total):
    tl.store(total, in_order(numbers, count))


def sum_of(numbers: Tensor) -> Tensor:
    """The sum of a flat tensor of doubles in its order: one float64 of no dimensions, on the device."""
    total = torch.empty((), dtype=torch.float64, device=numbers.device)
    launch(_sum_of, (1,), total, numbers, numbers.numel(), total, num_warps=1)
    return total


def room_for_sums(grid: tuple[int, int], device: torch.device, each: int = 1) -> Tensor:
    """Memory for the sums of the tiles of all runs, `each` a tile."""
    return torch.empty((grid[1], each, grid[0]), dtype=torch.float64, device=device)


# Masters --------------------------------------------------------------------------------------------------------------


@triton.jit
def load_master(x, low, at, mask, HAS_LOW: tl.constexpr):
    """The elements of a parameter, or of the master of `low`, replaced by it where they no longer round to it."""
    wide = tl.load(x + at, mask=mask, other=0.0)
    if HAS_LOW:
        rounded = tl.load(low + at, mask=mask, other=0.0)
        same = narrow(wide, low).to(tl.int16, bitcast=True) == rounded.to(tl.int16, bitcast=True)
        wide = tl.where(same, wide, widen(rounded))
    return wide


@triton.jit
def store_master(x, low, at, mask, value, HAS_LOW: tl.constexpr):
    """Store the elements of a parameter, and round them to the one whose master it is."""
    tl.store(x + at, value, mask=mask)
    if HAS_LOW:
        tl.store(low + at, narrow(value, low), mask=mask)

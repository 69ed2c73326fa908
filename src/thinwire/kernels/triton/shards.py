"""What is done for a shard as a whole; see the reference."""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.triton.common import WORD, WORDS, blocks_of, device_of, jit, launch, table_on, tile


@jit(do_not_specialize=["count", "length"])
def _shard_scale(sums, which, count, to, also, length, SUMS: tl.constexpr, TWICE: tl.constexpr):
    total = tl.zeros((), dtype=tl.float64)
    number = tl.zeros((), dtype=tl.float64)
    # 32 are loaded at a time, as each addition waits for the one before.
    for first in range(0, count, 32):
        for i in tl.static_range(32):
            there = first + i < count
            row = sums + tl.load(which + first + i, mask=there, other=0) * SUMS
            total += tl.load(row, mask=there, other=0.0)
            if SUMS == 3:
                number += tl.load(row + 2, mask=there, other=0.0)
    if SUMS == 1:
        number += length
    mean = total / tl.where(number == 0, 1.0, number)
    if SUMS == 1:
        mean = tl.sqrt(mean)
    scale = tl.where(number == 0, 0.0, mean).to(tl.float32)
    tl.store(to, scale)
    if TWICE:
        tl.store(also, scale)


def shard_scale(sums: Tensor, which: Tensor, to: Tensor, also: Tensor | None, *, length: int) -> None:
    """See the reference."""
    device = device_of("shard_scale", "sums", sums)
    arguments.shard_scale(sums, which, to, also, device)
    rows = table_on(sums.device, which)
    launch(
        _shard_scale, (1,), sums,
        sums, rows, rows.numel(), to, also, length,
        SUMS=sums.shape[1], TWICE=also is not None, num_warps=1,
    )  # fmt: skip


@jit(do_not_specialize=["count", "first"])
def _forget(state, marked, count, first, WORDS: tl.constexpr):
    word, offset = tile(WORDS)
    gone = tl.load(marked + word, mask=word < count, other=0) != 0
    empty = tl.zeros((WORDS, 64), dtype=state.dtype.element_ty)
    tl.store(state + first.to(tl.int64) * 64 + offset, empty, mask=gone[:, None])


def clear_words(state: Tensor, words: Tensor, *, first: int) -> None:
    """See the reference."""
    device = device_of("clear_words", "state", state)
    arguments.clear_words(state, words, first, device)
    count = words.numel()
    grid = (blocks_of(count * WORD.value),)
    launch(_forget, grid, state, state, words.view(torch.uint8), count, first, WORDS=WORDS)

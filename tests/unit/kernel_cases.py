"""What the kernel tests have in common: instruction sets, buffers with guards around them, and difficult numbers.

Kernels write into memory of the caller. Every tensor that is handed to one lies in the middle of a larger allocation,
and what is compared afterwards is the whole allocation: a backend that writes a byte too far, or into a gradient, does
not equal the reference.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from tests.instruction_sets import instruction_sets
from thinwire.kernels import native, ops, threads

WORD = 64
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
"""Whether this is `make sanitize`."""
ROOM = 0 if SANITIZED else 256
"""Bytes before and after every tensor. AddressSanitizer has guards of its own, which see reads as well as writes: there
a tensor fills its allocation."""
FLOAT_PLANES = 4 * 8
"""A float takes the room of so many bits."""

PATIENT = settings(deadline=None, max_examples=8 if SANITIZED else 40)  # a loaded machine is slow
REFERENCE = ops.BACKENDS["reference"]
ON_CPU = {name: ops.BACKENDS[name] for name in ("reference", "native")}
"""The backends that are at home there."""


ISAS = instruction_sets()
each_backend = pytest.mark.parametrize("backend", ["reference", *ISAS])
"""The reference, and the native kernels once for each instruction set of this machine."""


each_state = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
each_grad = pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16, None], ids=str)
either_amsgrad = pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
each_low = pytest.mark.parametrize("low_dtype", [None, torch.bfloat16, torch.float16], ids=str)

TAILS = (1, 63, 64, 65, 4095, 4096, 4097, 2 * 4096 + 321)
COUNTS = st.one_of(st.integers(1, 200), st.integers(1, 2000))
SEEDS = st.integers(0, 2**32 - 1)


def long(*values: Any) -> list[Any]:
    """Values of a parameter that only `make test-all` tests."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


@contextmanager
def kernels_of(backend: str) -> Iterator[ops.Kernels]:
    """The reference, or the native kernels with the instruction set `backend`."""
    if backend == "reference":
        yield REFERENCE
        return
    before = native.isa()
    native.use_isa(backend)
    try:
        yield ops.BACKENDS["native"]
    finally:
        native.use_isa(before)


@contextmanager
def on_threads(number: int) -> Iterator[ops.Kernels]:
    """The native kernels on so many threads, however few elements a call has."""
    least, threads.LEAST = threads.LEAST, 0
    lent = threads.Lent()
    lent.number = number
    threads.borrow(lent)
    try:
        yield ops.BACKENDS["native"]
    finally:
        threads.LEAST = least
        threads.borrow(None)


def guarded(values: Tensor, *, elements_off: int = 0) -> Tensor:
    """A copy of `values` in the middle of a larger allocation, `elements_off` elements from an aligned address."""
    size = values.element_size()
    before = ROOM // size + elements_off
    memory = torch.full((2 * ROOM + (values.numel() + elements_off) * size,), 0xA5, dtype=torch.uint8)
    within = memory.view(values.dtype).as_strided(values.shape, values.contiguous().stride(), before)
    return within.copy_(values)


def allocation(tensor: Tensor) -> Tensor:
    """All bytes of the allocation in which a tensor lies."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def copy_of(argument: Any) -> Any:
    """A copy of an argument in its own memory, with the bytes around it."""
    if not isinstance(argument, Tensor):
        return argument
    storage = argument.untyped_storage().clone()
    copy = torch.empty(0, dtype=argument.dtype)
    return copy.set_(storage, argument.storage_offset(), argument.shape, argument.stride())


def same_everywhere(operation: str, **arguments: Any) -> Any:
    """Calls an operation of the reference, in place, and of the native kernels of every kind, and on several threads,
    on copies of everything.

    All of the memory must be the same afterwards, and so must the results; returns the result.
    """
    kinds = [(isa, kernels_of(isa)) for isa in ISAS]
    kinds += [(f"{number} threads", on_threads(number)) for number in (2, 3, 4) if ISAS]
    copies = [{name: copy_of(argument) for name, argument in arguments.items()} for _ in kinds]
    expected = getattr(REFERENCE, operation)(**arguments)
    for (kind, chosen), copy in zip(kinds, copies, strict=True):
        with chosen as kernels:
            result = getattr(kernels, operation)(**copy)
        assert _same_result(result, expected), f"{operation} on {kind}: {result}, not {expected}"
        for name, argument in arguments.items():
            if isinstance(argument, Tensor):
                wrong = (allocation(copy[name]) != allocation(argument)).nonzero().flatten().tolist()
                assert not wrong, f"{operation} on {kind}: {name} differs in {len(wrong)} bytes, first {wrong[:4]}"
    return expected


def _same_result(result: Any, expected: Any) -> bool:
    if isinstance(expected, float):
        return isinstance(result, float) and struct.pack("<d", result) == struct.pack("<d", expected)
    if type(expected) is int:
        return type(result) is int and result == expected
    return result is expected  # True, False or None


# Flat spaces ---------------------------------------------------------------------------------------------------------


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_words(count: int, generator: torch.Generator) -> Tensor:
    """Words of random bits."""
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)


def random_bytes(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def activation_map(kind: str, words: int, generator: torch.Generator) -> Tensor:
    """`all`, `none`, or `some`: whole words of both kinds and words in between."""
    active = random_words(words, generator)
    if kind == "some":
        active[::3] = -1
        active[1::5] = 0
    else:
        active.fill_(-1 if kind == "all" else 0)
    return active


def cut(count: int, pieces: int, *, first_word: int, planes: int = 1) -> tuple[Tensor, int]:
    """A run table for a parameter of `count` elements at word `first_word`, and the size of its packets in bytes.

    The parameter is cut at words into at most `pieces` runs of unequal length, which stand in the packets in reverse
    order with gaps between them, and nothing behind the last; some of them are of one shard, numbered from 1.
    """
    words = -(-count // WORD)
    edges = sorted({words * (i * i) // (pieces * pieces) for i in range(pieces + 1)})
    runs: list[list[int]] = []
    byte, gap, size = 8, 16, 0
    for start, stop in reversed(list(pairwise(edges))):
        plane_bytes = 8 * (stop - start) + gap
        elements = min(stop * WORD, count) - start * WORD
        runs.append([(first_word + start) * WORD, start * WORD, elements, byte, plane_bytes, 1 + 2 * len(runs) // 3])
        size = byte + (4 * elements if planes == FLOAT_PLANES else planes * plane_bytes - gap)
        byte += planes * plane_bytes + 24
    return torch.tensor(runs[::-1]), size


# Difficult numbers ---------------------------------------------------------------------------------------------------

SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}


def hard_gradient(count: int, dtype: torch.dtype, generator: torch.Generator, *, finite: bool = True) -> Tensor:
    """Every magnitude that the dtype has, zeros of both signs among them; NaN and infinity too unless `finite`."""
    limits = torch.finfo(dtype)
    corners = [0.0, -0.0, SMALLEST[dtype], -3 * SMALLEST[dtype], limits.tiny, limits.max / 4, -limits.max / 4, 1.0]
    if not finite:
        corners += [float("nan"), float("inf"), float("-inf"), limits.max, limits.min]
    values = torch.randn(count, generator=generator)
    values *= 10.0 ** torch.randint(-9, 4, (count,), generator=generator)
    which = torch.randint(0, 2 * len(corners), (count,), generator=generator)
    for i, corner in enumerate(corners):
        values[which == i] = corner
    return values.to(dtype)


def hard_state(size: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """m and b of every magnitude with |m| <= b, some of them equal, some zero."""
    b = hard_gradient(size, dtype, generator).abs()
    share = 2 * torch.rand(size, generator=generator) - 1
    share[::7], share[3::11] = 1.0, -1.0
    m = (b.float() * share).to(dtype)
    return m.clamp(-b, b), b


# Cases that several files use ----------------------------------------------------------------------------------------


def encode_case(
    count: int,
    *,
    seed: int,
    grad_dtype: torch.dtype | None,
    state_dtype: torch.dtype,
    pieces: int = 1,
    active: str = "some",
    finite: bool = True,
    grad_off: int = 0,
    shift: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    """Arguments of `birder_encode`: `count` elements at word `seed % 5`, their state at `shift` elements before."""
    generator = random(seed)
    first_word = seed % 5
    words = first_word + -(-count // WORD)
    runs, size = cut(count, pieces, first_word=first_word)
    m, b = hard_state(words * WORD, state_dtype, generator)
    m[first_word * WORD + count :] = 0
    b[first_word * WORD + count :] = 0
    grad = None
    if grad_dtype is not None:
        grad = guarded(hard_gradient(count, grad_dtype, generator, finite=finite), elements_off=grad_off)
    return {
        "runs": runs,
        "grad": grad,
        "m": guarded(m[shift:]),
        "b": guarded(b[shift:]),
        "active": guarded(activation_map(active, words, generator)),
        "packets": guarded(random_bytes(size, generator=generator)),
        "beta": 0.8,
        "eps": 1e-12,
        "scale": 1.0,
        "amsgrad": False,
        "key": 0xFEDCBA9876543210 + seed,
        "shift": shift,
        **changes,
    }


def activity_refresh_case(
    shard_words: int,
    shards: int,
    first_word: int,
    period: int,
    phase: int,
    seed: int,
    state_dtype: torch.dtype,
    shift: int = 0,
) -> dict[str, Any]:
    generator = random(seed)
    _, state = hard_state((first_word + shards * shard_words) * WORD, state_dtype, generator)
    room = 8 * -(-shard_words // period)
    return {
        "state": guarded(state[shift:]),
        "first_word": first_word,
        "shard_words": shard_words,
        "shards": shards,
        "period": period,
        "phase": phase,
        "eps": 1e-4,
        "packets": guarded(random_bytes(shards, 40 + room, generator=generator)),
        "offset": 40,
        "shift": shift,
    }


def crc_case(count: int, *, seed: int, crc: int = 0, bytes_off: int = 0) -> dict[str, Any]:
    return {"data": guarded(random_bytes(count, generator=random(seed)), elements_off=bytes_off), "crc": crc}

"""Random numbers that depend on what they are for, not on the order of draws.

Every number is a hash of a key (seed, stream, step, worker) and a counter (the element's index in the flat space), so
threads, buckets, overlap and restarts change no bit. docs/protocol.md has the definition.
"""

from __future__ import annotations

import torch
from torch import Tensor

_U64 = (1 << 64) - 1
_U32 = (1 << 32) - 1

WORKER_STREAM = 0
OWNER_STREAM = 1
HASH_STREAM = 2
SHARED_STREAM = 3
"""Of numbers that all ranks draw alike."""
SHARD_STREAM = 4
"""Of the seeds of shards."""

HASH_PRIME = 2**31 - 1
"""The modulus of the polynomials that hash elements for count sketches."""


def splitmix(z: int) -> int:
    """One step of the splitmix64 generator, as a hash of 64 bits."""
    z = (z + 0x9E3779B97F4A7C15) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)


def key(*values: int) -> int:
    """The 64-bit key of a tuple of integers."""
    k = 0
    for value in values:
        k = splitmix((k + value) & _U64)
    return k


def shard_seed(seed: int, shard: int) -> int:
    """The seed for one of the shards of all parameters, below 2**63; `seed` itself for the first.

    The elements of each shard are counted from 0. With one seed for all, the same element of every shard would get the
    same random number.
    """
    return key(seed, SHARD_STREAM, shard) >> 1 if shard else seed


def worker_key(seed: int, step: int, worker: int) -> int:
    """The key under which `worker` samples its bits at `step`."""
    return key(seed, WORKER_STREAM, step, worker)


def owner_key(seed: int, step: int) -> int:
    """The key under which shard owners draw at `step`; all owners share it, as elements differ."""
    return key(seed, OWNER_STREAM, step)


def hash_coefficient(seed: int, row: int, power: int) -> int:
    """A coefficient, modulo HASH_PRIME, of the polynomial that hashes elements in a row of a count sketch."""
    return key(seed, HASH_STREAM, row, power) % HASH_PRIME


def draw(key: int, counters: Tensor) -> Tensor:
    """32 random bits per counter, as int64 in [0, 2**32)."""
    out = torch.empty_like(counters)
    high = counters >> 32
    for block in high.unique().tolist():
        here = high == block
        k = splitmix((key + block) & _U64)
        out[here] = _mix(counters[here] & _U32, k & _U32, k >> 32)
    return out


_CHUNK = 1 << 16
"""The number of draws at a time that fit the cache."""


def draw_range(key: int, first: int, last: int, device: torch.device) -> Tensor:
    """`draw` for the counters from `first` to `last` - 1, which are below 2**31, as int32 with the same bits."""
    k = splitmix(key)
    count = last - first
    out = torch.arange(first, last, dtype=torch.int32, device=device)
    shifted = torch.empty(min(count, _CHUNK), dtype=torch.int32, device=device)
    for x in out.split(_CHUNK):  # in place, because temporaries cost more than the arithmetic
        room = shifted[: x.numel()]
        x.bitwise_xor_(_signed(k & _U32))
        _fold(x, 16, room).mul_(0x7FEB352D)
        _fold(x, 15, room).add_(_signed(k >> 32))
        _fold(x.mul_(_signed(0x846CA68B)), 16, room).mul_(_signed(0x9E3779B1))
        _fold(x, 15, room)
    return out


def fractions(key: int, first: int, last: int, device: torch.device) -> Tensor:
    """float32 in [0, 1) with 24 bits, for the counters from `first` to `last` - 1."""
    bits = draw_range(key, first, last, device)
    return bits.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2.0**-24)


def _signed(bits: int) -> int:
    """32 bits as a signed number."""
    return (bits ^ 1 << 31) - (1 << 31)


def _fold(x: Tensor, by: int, room: Tensor) -> Tensor:
    """x ^= x >> by, as unsigned numbers."""
    torch.bitwise_right_shift(x, by, out=room)
    return x.bitwise_xor_(room.bitwise_and_((1 << 32 - by) - 1))


def _mix(x: Tensor, key_low: int, key_high: int) -> Tensor:
    x = x ^ key_low
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _U32
    x = x ^ (x >> 15)
    x = (x + key_high) & _U32
    x = (x * 0x846CA68B) & _U32
    x = x ^ (x >> 16)
    x = (x * 0x9E3779B1) & _U32
    return x ^ (x >> 15)


def fraction(key: int, counters: Tensor) -> Tensor:
    """float32 in [0, 1) with 24 bits, one per counter."""
    return (draw(key, counters) >> 8).to(torch.float32) * 2.0**-24


def uniform(key: int, counters: Tensor) -> Tensor:
    """float32 in [-1, 1) with 24 bits, one per counter."""
    signed = (draw(key, counters) ^ 0x80000000) - 0x80000000
    return (signed >> 8).to(torch.float32) * 2.0**-23

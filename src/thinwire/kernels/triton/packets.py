"""Headers and checksums of packets on the device that made them.

The CRC-32C of a packet is linear over GF(2): a word that `d` others follow counts for itself times x^(32 (d + 1)),
modulo the polynomial, and the inverted bits before the first byte and after the last for a constant of the length.
Words stand in groups and these in tiles, counted from the end of the packet; tables have the powers for each.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.header import (
    ACTIVATION,
    CHECKED,
    HEADER_BYTES,
    MAGIC,
    NONFINITE,
    RAISED,
    REFUSED,
    REFUSED_BY_PEER,
    SYNCHRONIZE,
    VERSION,
    Status,
)
from thinwire.kernels.reference.crc import CASTAGNOLI, INVERTED, power_of_x, product
from thinwire.kernels.triton.common import device_of, jit, launch

_GROUP, _GROUPS = 128, 16
"""Words of a group, of which fewer than 256 can be added up; and groups of a tile, which is what a program is for."""
_WORD_BYTES = 4

_MAGIC_AND_VERSION = tl.constexpr(MAGIC | VERSION << 16)
_MAGIC, _VERSION = tl.constexpr(MAGIC), tl.constexpr(VERSION)
_NONFINITE, _REFUSED, _RAISED = tl.constexpr(NONFINITE), tl.constexpr(REFUSED), tl.constexpr(RAISED)
_GREETING, _SYNCHRONIZE = tl.constexpr(ACTIVATION), tl.constexpr(SYNCHRONIZE)
_HEARD = tl.constexpr(REFUSED_BY_PEER)
_FLAGS, _CODE, _SENDER = (
    tl.constexpr(int(Status.FLAGS)),
    tl.constexpr(int(Status.CODE)),
    tl.constexpr(int(Status.SENDER)),
)
_STEP, _BUCKET = tl.constexpr(int(Status.STEP)), tl.constexpr(int(Status.BUCKET))
_GOT, _WANT = tl.constexpr(int(Status.GOT)), tl.constexpr(int(Status.WANT))
assert CHECKED[0] == "checksum" and len(CHECKED) == 10  # noqa: PT018 - one fact: `_look` counts them


# Checksums ------------------------------------------------------------------------------------------------------------


@cache
def _of_length(words: int) -> int:
    """What the inverted bits before and after so many words count for."""
    return _words(product(INVERTED, power_of_x(32 * words)) ^ INVERTED)[0]


def _words(*values: int) -> list[int]:
    """The lowest 32 bits of numbers, with signs: kernels are compiled for int32, whatever the numbers are."""
    return [(value & INVERTED) - ((value & 1 << 31) << 1) for value in values]


@cache
def _powers(device: torch.device, tiles: int) -> tuple[Tensor, Tensor, Tensor]:
    """The powers for the words of a group, first to last, and those for groups and so many tiles, last to first.

    Each is a row of 32, being times x^0, x^1, ..., x^31; but the words are the columns.
    """
    by_word, by_group, by_tile = [power_of_x(32)], [power_of_x(0)], [power_of_x(0)]
    while len(by_word) < _GROUP:
        by_word.append(product(by_word[-1], by_word[0]))
    while len(by_group) < _GROUPS:
        by_group.append(product(by_group[-1], by_word[-1]))
    whole_tile = product(by_group[-1], by_word[-1])
    while len(by_tile) < tiles:
        by_tile.append(product(by_tile[-1], whole_tile))
    of_words, of_groups, of_tiles = (_multiples(powers) for powers in (by_word[::-1], by_group, by_tile))
    return of_words.t().contiguous().to(device), of_groups.to(device), of_tiles.to(device)


def _multiples(powers: list[int]) -> Tensor:
    columns = [torch.tensor(powers, device="cpu")]
    while len(columns) < 32:
        last = columns[-1]
        columns.append((last >> 1) ^ ((last & 1) * CASTAGNOLI))
    return torch.stack(columns, dim=1).to(torch.int32)


@triton.jit
def _xor(values):
    """The *exclusive or* of each row of fewer than 256 words: eight times the parity of four bits, by sums of bytes."""
    total = tl.zeros((values.shape[0],), dtype=tl.int32)
    for bit in tl.static_range(8):
        total |= (tl.sum((values >> bit) & 0x01010101, axis=1) & 0x01010101) << bit
    return total


@triton.jit
def _xor_of_few(values):
    """The same, where eight times as many fit into registers."""
    bit = tl.arange(0, 8)
    parities = tl.sum((values[:, :, None] >> bit[None, None, :]) & 0x01010101, axis=1) & 0x01010101
    return tl.sum(parities << bit[None, :], axis=1)


@triton.jit
def _times(values, multiples):
    """The products of words with powers, whose multiples are the rows."""
    bit = (values[:, None] >> (31 - tl.arange(0, 32))[None, :]) & 1
    return _xor_of_few(multiples & -bit)


@triton.jit
def _checksum(
    packets, stride, copies, words, of_words, of_groups, of_tiles, sums, sums_stride,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Add the words of a packet behind its first, which is for the checksum, to what stands for it in `sums`."""
    packet = tl.program_id(1).to(tl.int64)
    from_ = (packets + packet // copies * stride).to(tl.pointer_type(tl.int32)) + packet % copies * words
    group, bit = tl.arange(0, GROUPS)[:, None], tl.arange(0, 32)[None, :]
    in_group = tl.arange(0, GROUP)[None, :]
    word = words - (tl.program_id(0) * GROUPS + group + 1) * GROUP + in_group
    values = tl.load(from_ + word, mask=word > 0, other=0)
    products = tl.zeros((GROUPS, GROUP), dtype=tl.int32)
    for _ in tl.range(32):
        products ^= (values >> 31) & tl.load(of_words + in_group)
        values = values << 1
        of_words += GROUP
    of_tile = _xor_of_few(_times(_xor(products), tl.load(of_groups + group * 32 + bit))[None, :])
    total = _times(of_tile, tl.load(of_tiles + tl.program_id(0) * 32 + bit))
    tl.atomic_xor(sums + packet * sums_stride + tl.arange(0, 1), total, sem="relaxed")


def _add_checksums(packets: Tensor, copies: int, sums: Tensor, stride: int) -> None:
    rows, length = packets.shape[0], packets.shape[1] // copies
    words = length // _WORD_BYTES
    tiles = triton.cdiv(words - 1, _GROUP * _GROUPS)
    powers = _powers(packets.device, triton.next_power_of_2(tiles))
    launch(
        _checksum, (tiles, rows * copies), packets,
        packets, packets.stride(0), copies, words, *powers, sums, stride,
        GROUP=_GROUP, GROUPS=_GROUPS,
    )  # fmt: skip


# Headers --------------------------------------------------------------------------------------------------------------


@jit(do_not_specialize=["step", "step_high", "bucket", "who", "layout", "length", "inverted"])
def _write_header(packets, stride, status, step, step_high, bucket, who, layout, length, inverted):
    head = (packets + tl.program_id(0).to(tl.int64) * stride).to(tl.pointer_type(tl.int32))
    tl.store(head, inverted)
    tl.store(head + 1, _MAGIC_AND_VERSION)
    tl.store(head + 2, who | (tl.load(status + _FLAGS) & _RAISED).to(tl.int32))
    tl.store(head + 3, step)
    tl.store(head + 4, step_high)
    tl.store(head + 5, bucket)
    tl.store(head + 6, length)
    tl.store(head + 7, layout)


def packet_seal(
    packets: Tensor, status: Tensor, *, step: int, bucket: int, sender: int, flags: int, layout: int
) -> None:
    """See the reference."""
    device = device_of("packet_seal", "packets", packets)
    arguments.sealed("packet_seal", packets, status, 1, device)
    rows, length = packets.shape
    launch(
        _write_header, (rows,), packets,
        packets, packets.stride(0), status, *_words(step, step >> 32, bucket, flags | sender << 16, layout),
        length - HEADER_BYTES, _of_length(length // _WORD_BYTES - 1),
        num_warps=1,
    )  # fmt: skip
    _add_checksums(packets, 1, packets.view(torch.int32), packets.stride(0) // _WORD_BYTES)


@triton.jit
def _half(word, HIGH: tl.constexpr):
    return (word >> (16 * HIGH)) & 0xFFFF


@triton.jit
def _unsigned(word):
    return word.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _field(head, number, mask):
    """A word of the headers, without a sign."""
    return _unsigned(tl.load(head + number, mask=mask, other=0))


@triton.jit
def _unless(number, got, want, outcome):
    """What is wrong with packets, given what is wrong with the fields behind this one: it comes before them."""
    wrong = got != want
    code, was, due = outcome
    return tl.where(wrong, number, code), tl.where(wrong, got, was), tl.where(wrong, want, due)


@jit(do_not_specialize=["rows", "step", "step_high", "bucket", "flags", "layout"])
def _check(
    packets,
    stride,
    rows,
    copies,
    length,
    senders,
    sums,
    status,
    step,
    step_high,
    bucket,
    flags,
    layout,
    ROWS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    mask = row < rows
    due_step = _unsigned(step) | (_unsigned(step_high) << 32)
    sender = tl.load(senders + row, mask=mask, other=0).to(tl.int64)
    code = tl.full((ROWS,), -1, dtype=tl.int64)
    got, want, raised = tl.zeros((ROWS,), tl.int64), tl.zeros((ROWS,), tl.int64), tl.zeros((ROWS,), tl.int64)
    for copy in range(copies):
        head = (packets + (row.to(tl.int64) * stride + tl.cast(copy, tl.int64) * length)).to(tl.pointer_type(tl.int32))
        due = _field(sums, row * copies + copy, mask)
        kind, who = _field(head, 1, mask), _field(head, 2, mask)
        seen = _half(who, 0)
        when = _field(head, 3, mask) | (_field(head, 4, mask) << 32)
        outcome = (tl.zeros((ROWS,), tl.int64), tl.zeros((ROWS,), tl.int64), tl.zeros((ROWS,), tl.int64))
        outcome = _unless(10, seen & _SYNCHRONIZE, flags & _SYNCHRONIZE, outcome)
        outcome = _unless(9, seen & _GREETING, flags & _GREETING, outcome)
        outcome = _unless(8, _field(head, 7, mask), _unsigned(layout), outcome)
        outcome = _unless(7, _field(head, 6, mask), tl.cast(length, tl.int64) - 32, outcome)
        outcome = _unless(6, _field(head, 5, mask), _unsigned(bucket), outcome)
        outcome = _unless(5, when, due_step, outcome)
        outcome = _unless(4, _half(who, 1), sender, outcome)
        outcome = _unless(3, _half(kind, 1), tl.full((ROWS,), _VERSION, tl.int64), outcome)
        outcome = _unless(2, _half(kind, 0), tl.full((ROWS,), _MAGIC, tl.int64), outcome)
        outcome = _unless(1, _field(head, 0, mask), due, outcome)
        # The first copy that is as expected counts, or else the last.
        better = code != 0
        raised = tl.where(better, tl.where(outcome[0] == 0, seen & _RAISED, 0), raised)
        got, want = tl.where(better, outcome[1], got), tl.where(better, outcome[2], want)
        code = tl.where(better, outcome[0], code)
    code = tl.where((code == 0) & ((raised & _REFUSED) != 0), _HEARD, code)
    code = tl.where(mask, code, 0)
    raised = tl.where(mask, raised | tl.where(code != 0, _REFUSED, 0), 0)
    news = tl.max(raised & _NONFINITE, axis=0) | tl.max(raised & _REFUSED, axis=0)
    # Of the size that encoding kernels raise `bad` with, who may do so on another stream just now.
    flags_word = (status + _FLAGS).to(tl.pointer_type(tl.int32))
    tl.atomic_or(flags_word, news.to(tl.int32), sem="relaxed")
    lowest = tl.min(tl.where(code != 0, row, ROWS), axis=0)
    noted = row == tl.where(tl.load(status + _CODE) == 0, lowest, ROWS)
    tl.store(status + _CODE + row * 0, code, mask=noted)
    tl.store(status + _SENDER + row * 0, sender, mask=noted)
    tl.store(status + _STEP + row * 0, due_step, mask=noted)
    tl.store(status + _BUCKET + row * 0, _unsigned(bucket), mask=noted)
    tl.store(status + _GOT + row * 0, got, mask=noted)
    tl.store(status + _WANT + row * 0, want, mask=noted)


def packet_check(
    packets: Tensor,
    senders: Tensor,
    status: Tensor,
    *,
    step: int,
    bucket: int,
    flags: int,
    layout: int,
    copies: int = 1,
) -> None:
    """See the reference."""
    device = device_of("packet_check", "packets", packets)
    arguments.sealed("packet_check", packets, status, copies, device)
    arguments.sent("packet_check", senders, packets.shape[0], device)
    rows, length = packets.shape[0], packets.shape[1] // copies
    of_length = _of_length(length // _WORD_BYTES - 1)
    sums = torch.full((rows * copies,), of_length, dtype=torch.int32, device=packets.device)
    _add_checksums(packets, copies, sums, 1)
    launch(
        _check, (1,), packets,
        packets, packets.stride(0), rows, copies, length, senders, sums, status,
        *_words(step, step >> 32, bucket, flags, layout),
        ROWS=triton.next_power_of_2(rows),
    )  # fmt: skip

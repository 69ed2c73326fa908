"""Headers and checksums of packets on the device that made them.

The CRC-32C of a packet is linear over GF(2): a word that `d` others follow counts for itself times x^(32 (d + 1)),
modulo the polynomial, and the inverted bits before the first byte and after the last for a constant of the length.
Words stand in groups and these in tiles, counted from the end of the packet; tables have the powers for each.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import struct
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import arguments, header
from thinwire.kernels.header import (
    ACTIVATION,
    CODES,
    FIELD_BYTES,
    FIELD_OFFSETS,
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

_HEADER_BYTES, _HEADER_WORDS = tl.constexpr(HEADER_BYTES), tl.constexpr(HEADER_BYTES // _WORD_BYTES)
_FLAGS_WORD = tl.constexpr(FIELD_OFFSETS["flags"] // _WORD_BYTES)
_FLAGS_SHIFT = tl.constexpr(8 * (FIELD_OFFSETS["flags"] % _WORD_BYTES))
_MAGIC, _VERSION = tl.constexpr(MAGIC), tl.constexpr(VERSION)
_NONFINITE, _REFUSED, _RAISED = tl.constexpr(NONFINITE), tl.constexpr(REFUSED), tl.constexpr(RAISED)
_ACTIVATION, _SYNCHRONIZE = tl.constexpr(ACTIVATION), tl.constexpr(SYNCHRONIZE)
_REFUSED_BY_PEER = tl.constexpr(REFUSED_BY_PEER)


def _place(field: str) -> tuple[tl.constexpr, tl.constexpr]:
    """The offset and the width of a field, in bytes."""
    return tl.constexpr(FIELD_OFFSETS[field]), tl.constexpr(FIELD_BYTES[field])


_CHECKSUM_AT, _CHECKSUM_BYTES = _place("checksum")
_MAGIC_AT, _MAGIC_BYTES = _place("magic")
_VERSION_AT, _VERSION_BYTES = _place("version")
_FLAGS_AT, _FLAGS_BYTES = _place("flags")
_SENDER_AT, _SENDER_BYTES = _place("sender")
_STEP_AT, _STEP_BYTES = _place("step")
_BUCKET_AT, _BUCKET_BYTES = _place("bucket")
_LENGTH_AT, _LENGTH_BYTES = _place("length")
_LAYOUT_AT, _LAYOUT_BYTES = _place("layout")

_WRONG_CHECKSUM, _WRONG_MAGIC, _WRONG_VERSION, _WRONG_SENDER, _WRONG_STEP = (
    tl.constexpr(CODES[name]) for name in ("checksum", "magic", "version", "sender", "step")
)
_WRONG_BUCKET, _WRONG_LENGTH, _WRONG_LAYOUT, _WRONG_ACTIVATION, _WRONG_SYNCHRONIZE = (
    tl.constexpr(CODES[name]) for name in ("bucket", "length", "layout", "activation", "synchronize")
)

_FLAGS, _CODE, _SENDER, _STEP, _BUCKET, _GOT, _WANT = (tl.constexpr(int(word)) for word in Status)


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


@jit(do_not_specialize=["checksum", "w1", "w2", "w3", "w4", "w5", "w6", "w7"])
def _write_header(packets, stride, status, checksum, w1, w2, w3, w4, w5, w6, w7):
    head = (packets + tl.program_id(0).to(tl.int64) * stride).to(tl.pointer_type(tl.int32))
    raised = (tl.load(status + _FLAGS) & _RAISED).to(tl.int32) << _FLAGS_SHIFT
    words = (checksum, w1, w2, w3, w4, w5, w6, w7)
    for i in tl.static_range(_HEADER_WORDS):
        if i == _FLAGS_WORD:
            tl.store(head + i, words[i] | raised)
        else:
            tl.store(head + i, words[i])


def packet_seal(
    packets: Tensor, status: Tensor, *, step: int, bucket: int, sender: int, flags: int, layout: int
) -> None:
    """See the reference."""
    device = device_of("packet_seal", "packets", packets)
    arguments.sealed("packet_seal", packets, status, 1, device)
    rows, size = packets.shape
    head = bytearray(HEADER_BYTES)
    length = size - HEADER_BYTES
    header.write(head, flags=flags, sender=sender, step=step, bucket=bucket, length=length, layout=layout)
    _, *words = struct.unpack(f"<{HEADER_BYTES // _WORD_BYTES}i", head)
    launch(
        _write_header, (rows,), packets,
        packets, packets.stride(0), status, _of_length(size // _WORD_BYTES - 1), *words,
        num_warps=1,
    )  # fmt: skip
    _add_checksums(packets, 1, packets.view(torch.int32), packets.stride(0) // _WORD_BYTES)


@triton.jit
def _unsigned(word):
    return word.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _field(head, mask, AT: tl.constexpr, BYTES: tl.constexpr):
    """A field of the headers, without a sign. Headers are read by words, as fields of 8 bytes need not be aligned."""
    value = _unsigned(tl.load(head + AT // 4, mask=mask, other=0))
    if BYTES == 2:
        value = (value >> (8 * (AT % 4))) & 0xFFFF
    if BYTES == 8:
        value |= _unsigned(tl.load(head + AT // 4 + 1, mask=mask, other=0)) << 32
    return value


@triton.jit
def _unless(number, got, want, outcome):
    """The outcome after comparing a field, given the outcome of the fields after it."""
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
        checksum = _unsigned(tl.load(sums + row * copies + copy, mask=mask, other=0))
        seen = _field(head, mask, _FLAGS_AT, _FLAGS_BYTES)
        payload = tl.cast(length, tl.int64) - _HEADER_BYTES
        version, magic = tl.full((ROWS,), _VERSION, tl.int64), tl.full((ROWS,), _MAGIC, tl.int64)
        outcome = (tl.zeros((ROWS,), tl.int64), tl.zeros((ROWS,), tl.int64), tl.zeros((ROWS,), tl.int64))
        # From the last field to the first, as the first that differs counts.
        outcome = _unless(_WRONG_SYNCHRONIZE, seen & _SYNCHRONIZE, flags & _SYNCHRONIZE, outcome)
        outcome = _unless(_WRONG_ACTIVATION, seen & _ACTIVATION, flags & _ACTIVATION, outcome)
        outcome = _unless(_WRONG_LAYOUT, _field(head, mask, _LAYOUT_AT, _LAYOUT_BYTES), _unsigned(layout), outcome)
        outcome = _unless(_WRONG_LENGTH, _field(head, mask, _LENGTH_AT, _LENGTH_BYTES), payload, outcome)
        outcome = _unless(_WRONG_BUCKET, _field(head, mask, _BUCKET_AT, _BUCKET_BYTES), _unsigned(bucket), outcome)
        outcome = _unless(_WRONG_STEP, _field(head, mask, _STEP_AT, _STEP_BYTES), due_step, outcome)
        outcome = _unless(_WRONG_SENDER, _field(head, mask, _SENDER_AT, _SENDER_BYTES), sender, outcome)
        outcome = _unless(_WRONG_VERSION, _field(head, mask, _VERSION_AT, _VERSION_BYTES), version, outcome)
        outcome = _unless(_WRONG_MAGIC, _field(head, mask, _MAGIC_AT, _MAGIC_BYTES), magic, outcome)
        outcome = _unless(_WRONG_CHECKSUM, _field(head, mask, _CHECKSUM_AT, _CHECKSUM_BYTES), checksum, outcome)
        # The first copy that is as expected counts, or else the last.
        better = code != 0
        raised = tl.where(better, tl.where(outcome[0] == 0, seen & _RAISED, 0), raised)
        got, want = tl.where(better, outcome[1], got), tl.where(better, outcome[2], want)
        code = tl.where(better, outcome[0], code)
    code = tl.where((code == 0) & ((raised & _REFUSED) != 0), _REFUSED_BY_PEER, code)
    code = tl.where(mask, code, 0)
    raised = tl.where(mask, raised | tl.where(code != 0, _REFUSED, 0), 0)
    news = tl.max(raised & _NONFINITE, axis=0) | tl.max(raised & _REFUSED, axis=0)
    # 32 bits, as encoding kernels use to raise `bad`, possibly on another stream at the same time.
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

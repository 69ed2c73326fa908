"""Tensors of whole packets and shards."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels.arguments._parts import BYTES, MAX_WORDS
from thinwire.kernels.bounds import (
    BOOL,
    F32,
    F64,
    I64,
    STATES,
    U8,
    WORD,
    Device,
    need,
    need_number,
    need_one_of,
    need_rows,
)
from thinwire.kernels.header import HEADER_BYTES, STATUS_WORDS


def crc32c(data: Tensor, crc: int, device: Device = None) -> None:
    """Check the arguments of `crc32c`."""
    need("crc32c", "data", data, U8, 0, device)
    if data.dim() != 1:
        raise ValueError(f"crc32c: data has the shape {tuple(data.shape)}: expected a row of bytes")
    need_number("crc32c", "crc", crc, 0, 2**32 - 1)  # ctypes would take the lowest bits of anything


def sealed(kernel: str, packets: Tensor, status: Tensor, copies: int, device: Device) -> None:
    """Check the tensors of `packet_seal` and `packet_check`, whose name is `kernel`."""
    need_rows(kernel, "packets", packets, BYTES, 0, copies * HEADER_BYTES, device)
    need(kernel, "status", status, I64, STATUS_WORDS, device)


def sent(kernel: str, senders: Tensor, rows: int, device: Device) -> None:
    """Check that there is a sender for every row of packets."""
    need(kernel, "senders", senders, I64, rows, device)


def shard_scale(sums: Tensor, which: Tensor, to: Tensor, also: Tensor | None, device: Device = None) -> None:
    """Check the tensors of `shard_scale`; `which` is a table on the host, as runs are."""
    need("shard_scale", "sums", sums, F64, 0, device)
    need("shard_scale", "which", which, I64, 0, None)
    need("shard_scale", "to", to, F32, 1, device)
    if also is not None:
        need("shard_scale", "also", also, F32, 1, device)


def clear_words(state: Tensor, words: Tensor, first: int, device: Device = None) -> None:
    """Check the tensors of `clear_words`."""
    need_number("clear_words", "first", first, 0, MAX_WORDS)
    need("clear_words", "words", words, BOOL, 0, device)
    need_one_of("clear_words", "state", state, STATES, WORD * (first + words.numel()), device)

"""Shared by all kernels: runs, bits in words, sums in a fixed order, and masters of low-precision parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.bounds import is_dense

LIMIT = 2.0**60
"""States stay below it, so that the sum of their squares is finite."""


@dataclass(frozen=True)
class Run:
    """A row of a run table; see `thinwire.kernels.reference`."""

    element: int
    in_param: int
    count: int
    byte: int
    plane_bytes: int
    shard: int

    @property
    def words(self) -> int:
        """Number of words of its bits."""
        return -(-self.count // 64)

    @property
    def of_param(self) -> slice:
        """Its elements in their parameter."""
        return slice(self.in_param, self.in_param + self.count)

    def of_flat(self, shift: int = 0) -> slice:
        """Its elements in a tensor that has the element `e` of the flat space at `e - shift`; without the padding."""
        return slice(self.element - shift, self.element - shift + self.count)

    def bits_of(self, flat_words: Tensor) -> Tensor:
        """Its bits in the words of the flat space."""
        return unpack(flat_words[self.element // 64 : self.element // 64 + self.words])[: self.count]

    def bits_in(self, packet: Tensor) -> Tensor:
        """Its bits in a packet."""
        return unpack(words_at(packet, self.byte, self.words))[: self.count]

    def write_bits(self, packet: Tensor, bits: Tensor) -> None:
        """Put its bits into a packet, those of the padding being 0."""
        words_at(packet, self.byte, self.words).copy_(pack(padded(bits)))

    def floats_in(self, packet: Tensor) -> Tensor:
        """Its floats in a packet, as a view."""
        return packet.view(-1)[self.byte : self.byte + 4 * self.count].view(torch.float32)

    def bytes_in(self, packet: Tensor, word_bytes: int) -> Tensor:
        """Its words of so many bytes in a packet, a row each, as a view."""
        return packet.view(-1)[self.byte : self.byte + self.words * word_bytes].view(self.words, word_bytes)


def each_run(runs: Tensor) -> Iterator[Run]:
    """The rows of a run table."""
    return (Run(*row) for row in runs.tolist())


def pack(bits: Tensor) -> Tensor:
    """Bools, a multiple of 64 of them, as int64 words."""
    weights = torch.ones(64, dtype=torch.int64, device=bits.device) << torch.arange(64, device=bits.device)
    return (bits.view(-1, 64).to(torch.int64) * weights).sum(1)


def unpack(words: Tensor) -> Tensor:
    """The bools of int64 words."""
    return ((words[:, None] >> torch.arange(64, device=words.device)) & 1).to(torch.bool).view(-1)


def words_at(buffer: Tensor, byte: int, count: int) -> Tensor:
    """`count` words of a packet buffer, as a view."""
    return buffer.view(-1)[byte : byte + 8 * count].view(torch.int64)


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor in the order of its memory, as a view.

    Raises:
        ValueError: when it has gaps, or places that are several elements.
    """
    if not is_dense(tensor):
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()}: expected one without gaps in memory"
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def float32(value: float) -> Tensor:
    """A number rounded to float32, whose products with others are rounded to float32 too."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")  # of no dimensions: goes with all devices


def root(values: Tensor) -> Tensor:
    """Square roots in float32, rounded as IEEE 754 has it; torch's own are not always (on x86 they are MKL's)."""
    return values.to(torch.float64).sqrt().to(torch.float32)


def signed(positive: Tensor, scale: Tensor) -> Tensor:
    """`scale` where `positive`, else `-scale`."""
    return torch.where(positive, scale, -scale)


def without_sign(state: Tensor, scale: Tensor) -> Tensor:
    """The residual of a state, in float32, after its sign was sent with `scale`; the sign of a zero is positive."""
    wide = state.to(torch.float32)
    return wide - signed(wide >= 0, scale)


def guarded(new: Tensor, instead: Tensor) -> tuple[Tensor, bool]:
    """`new`, but `instead` where it is NaN or too large; and whether there was such an element."""
    good = new.abs() < LIMIT
    return torch.where(good, new, instead), not bool(good.all())


def run_sum(values: Tensor) -> float:
    """The sum of a run's float32 values: each word's in float32, by halves; of 32 words each in double, by halves; and
    those in order. A Triton program adds 32 words in parallel; only the last sum is sequential.

    Not by the built-in `sum`, which compensates for rounding since Python 3.12.
    """
    total = 0.0
    for tile in by_halves(padded(by_halves(padded(values), 64).double(), 32), 32).tolist():
        total += tile
    return total


def by_halves(values: Tensor, together: int) -> Tensor:
    """The sums of so many neighbours each, halves added to halves."""
    rows, half = values.view(-1, together), together // 2
    while half:
        rows = rows[:, :half] + rows[:, half : 2 * half]
        half //= 2
    return rows.view(-1)


def padded(values: Tensor, together: int = 64) -> Tensor:
    """Values, and zeros up to a whole number of words, or of so many together."""
    whole = values.new_zeros(-(-values.numel() // together) * together)
    whole[: values.numel()] = values
    return whole


def load_master(x: Tensor, low: Tensor | None, here: slice) -> Tensor:
    """The elements `here` of fp32 `x`, as a view. Those that no longer round to `low` are replaced by it first.

    `low` is the low-precision parameter whose master `x` is, or None. A user may have loaded weights into it.
    """
    wide = flat(x)[here]
    if low is not None:
        narrow = flat(low)[here]
        rounds_to_it = wide.to(low.dtype).view(torch.int16) == narrow.view(torch.int16)
        wide.copy_(torch.where(rounds_to_it, wide, narrow.float()))
    return wide


def store_master(x: Tensor, low: Tensor | None, here: slice) -> None:
    """Round the elements `here` of a master to its parameter, if it is one."""
    if low is not None:
        flat(low)[here] = flat(x)[here]

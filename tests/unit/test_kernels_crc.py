"""Checksums: native kernels equal the reference, and both a division of polynomials with paper and pencil."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.kernel_cases import (
    PATIENT,
    SEEDS,
    crc_case,
    each_backend,
    guarded,
    kernels_of,
    random,
    random_bytes,
    same_everywhere,
)

STREAMS = (64, 512, 4096, 65536)
"""Native kernels divide three times so many bytes side by side."""

CRCS = st.one_of(st.sampled_from([0, 1, 2**31, 2**32 - 1]), st.integers(0, 2**32 - 1))


def tensor_of(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def backwards(register: int) -> int:
    return int(f"{register:032b}"[::-1], 2)


def crcs(data: bytes, crc: int = 0) -> list[int]:
    """The CRC before each byte and after the last, bit by bit as RFC 3720 has it: x^31 is the highest bit."""
    register = backwards(crc ^ 0xFFFFFFFF)
    registers = [register]
    for byte in data:
        for bit in range(8):
            carry = (register >> 31) ^ (byte >> bit & 1)
            register = (register << 1 & 0xFFFFFFFF) ^ (0x1EDC6F41 if carry else 0)
        registers.append(register)
    return [backwards(register) ^ 0xFFFFFFFF for register in registers]


READ_COMMAND = bytes.fromhex(
    "01c00000 00000000 00000000 00000000 14000000 00000400 00000014 00000018 28000000 00000000 02000000 00000000"
)
KNOWN = {
    "nothing": (b"", 0),
    "a letter": (b"a", 0xC1D04330),
    "the digits of catalogues": (b"123456789", 0xE3069283),
    "RFC 3720: zeros": (bytes(32), 0x8A9136AA),
    "RFC 3720: ones": (b"\xff" * 32, 0x62A8AB43),
    "RFC 3720: ascending": (bytes(range(32)), 0x46DD794E),
    "RFC 3720: descending": (bytes(range(31, -1, -1)), 0x113FDB5C),
    "RFC 3720: a read command": (READ_COMMAND, 0xD9963A56),
}


@each_backend
@pytest.mark.parametrize("known", KNOWN)
def test_messages_with_known_checksums(backend: str, known: str) -> None:
    data, crc = KNOWN[known]
    assert crcs(data)[-1] == crc
    with kernels_of(backend) as kernels:
        assert kernels.crc32c(tensor_of(data)) == crc


def test_every_length_about_the_sizes_of_streams() -> None:
    """The first bytes of one message, up to two triples of the longest streams and some of each of the others."""
    lengths = set(range(70))
    for stream in STREAMS:
        lengths |= {3 * stream + more for more in (-8, -1, 0, 1, 8, 71)}
    lengths |= {sum(6 * stream for stream in STREAMS) + 15}
    data = random_bytes(max(lengths), generator=random(0))
    expected = crcs(bytes(data.tolist()))
    for length in lengths:
        assert same_everywhere("crc32c", data=guarded(data[:length])) == expected[length]


@PATIENT
@given(count=st.one_of(st.integers(0, 40), st.integers(0, 3000)), seed=SEEDS, crc=CRCS, bytes_off=st.integers(0, 70))
def test_whatever_it_is_given(count: int, seed: int, crc: int, bytes_off: int) -> None:
    case = crc_case(count, seed=seed, crc=crc, bytes_off=bytes_off)
    expected = crcs(bytes(case["data"].tolist()), crc)[-1]
    assert same_everywhere("crc32c", **case) == expected


@each_backend
@PATIENT
@given(seed=SEEDS, cuts=st.lists(st.integers(0, 20_000), max_size=5), crc=CRCS)
def test_a_message_in_pieces_has_the_checksum_of_the_whole(backend: str, seed: int, cuts: list[int], crc: int) -> None:
    data = random_bytes(20_000, generator=random(seed))
    with kernels_of(backend) as kernels:
        whole = kernels.crc32c(data, crc)
        for start, stop in pairwise([0, *sorted(cuts), 20_000]):
            crc = kernels.crc32c(data[start:stop], crc)
    assert crc == whole


@each_backend
def test_nothing_adds_nothing(backend: str) -> None:
    with kernels_of(backend) as kernels:
        for crc in (0, 1, 0xE3069283, 0xFFFFFFFF):
            assert kernels.crc32c(torch.empty(0, dtype=torch.uint8), crc) == crc


@each_backend
@pytest.mark.parametrize("count", [1, 13, 3 * 64 + 13])
def test_a_bit_that_flips_is_noticed(backend: str, count: int) -> None:
    """Whichever it is; and no two of them have the same checksum."""
    data = random_bytes(count, generator=random(count))
    seen: set[int] = set()
    with kernels_of(backend) as kernels:
        seen.add(kernels.crc32c(data))
        for at in range(count):
            for bit in range(8):
                data[at] ^= 1 << bit
                seen.add(kernels.crc32c(data))
                data[at] ^= 1 << bit
    assert len(seen) == 8 * count + 1


@each_backend
def test_bytes_that_change_places_are_noticed(backend: str) -> None:
    """Also the same places of two streams: a sum of the streams would miss it."""
    data = random_bytes(3 * 64, generator=random(1))
    with kernels_of(backend) as kernels:
        assert kernels.crc32c(data) != kernels.crc32c(data.view(3, 64)[[1, 0, 2]].view(-1))
        assert kernels.crc32c(data) != kernels.crc32c(data.view(3, 64)[[0, 2, 1]].view(-1))


@each_backend
@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(8),
        torch.zeros(8, dtype=torch.int8),
        torch.zeros(2, 4, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.uint8)[::2],
    ],
    ids=["floats", "signed", "two dimensions", "gaps"],
)
def test_what_is_no_row_of_bytes_is_refused(backend: str, data: Tensor) -> None:
    with kernels_of(backend) as kernels, pytest.raises((TypeError, ValueError), match=r"^crc32c: data .*expected"):
        kernels.crc32c(data)


@each_backend
@pytest.mark.parametrize("crc", [-1, 2**32])
def test_what_is_no_checksum_is_refused(backend: str, crc: int) -> None:
    with kernels_of(backend) as kernels, pytest.raises(ValueError, match=rf"^crc32c: crc={crc}: expected"):
        kernels.crc32c(torch.zeros(8, dtype=torch.uint8), crc)


def test_megabytes() -> None:
    """More than the reference looks at together."""
    same_everywhere("crc32c", **crc_case(3 * 2**20 + 77, seed=2, crc=5, bytes_off=3))

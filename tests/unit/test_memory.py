"""Zeros that take no memory until they are written, and that can be given back."""

from __future__ import annotations

import gc
import mmap
import sys
from pathlib import Path

import pytest
import torch

from thinwire.transport.memory import HOST, untouched_zeros, zero_and_give_back

ELEMENTS = 8 << 20


def resident() -> int:
    """The bytes of this process that are in memory, without those of files, which a busy system may take away.

    Garbage of earlier tests goes now, and not between two calls.
    """
    gc.collect()
    _, pages, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (pages - of_files) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep the memory")
def test_memory_is_taken_by_writing_and_given_back() -> None:
    start = resident()
    tensor = untouched_zeros(ELEMENTS, torch.float32, HOST)
    view = tensor[100:200]
    size, slack = tensor.nbytes, tensor.nbytes // 4
    assert resident() - start < slack
    tensor.fill_(3.0)
    assert abs(resident() - start - size) < slack
    zero_and_give_back(tensor)
    assert resident() - start < slack
    assert not view.any()
    view.fill_(5.0)
    assert tensor.count_nonzero() == len(view)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="other systems have no such advice")
def test_large_tensors_get_huge_pages() -> None:
    for elements, huge in ((ELEMENTS, True), (1000, False)):
        tensor = untouched_zeros(elements, torch.float32, HOST)
        assert ("hg" in flags_of_mapping(tensor.data_ptr())) == huge


def flags_of_mapping(address: int) -> list[str]:
    """How the system treats the memory at an address: `VmFlags` of proc(5)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field, *rest = line.split()
        if not field.endswith(":"):
            first, _, last = field.partition("-")
            inside = int(first, 16) <= address < int(last, 16)
        elif inside and field == "VmFlags:":
            return rest
    raise AssertionError(f"no mapping has the address {address:#x}")


def test_a_part_of_a_tensor_becomes_zero_alone() -> None:
    tensor = untouched_zeros(ELEMENTS, torch.float32, HOST).fill_(3.0)
    zero_and_give_back(tensor[:100])
    assert tensor.count_nonzero() == ELEMENTS - 100


@pytest.mark.parametrize("tensor", [torch.ones(100), torch.ones(100)[10:20], torch.ones(0)], ids=["", "view", "empty"])
def test_other_tensors_become_zero(tensor: torch.Tensor) -> None:
    zero_and_give_back(tensor)
    assert not tensor.any()

"""The benchmarks outside the package: they say what they miss, and compare with what they claim to."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.against_deepspeed import NumpyPacker

AGAINST_DEEPSPEED = Path(__file__).parents[2] / "benchmarks" / "against_deepspeed.py"
SECONDS = 300

has_deepspeed = find_spec("deepspeed") is not None


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(AGAINST_DEEPSPEED), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.mark.parametrize("elements", [1, 8, 1003])
def test_packer_keeps_signs_as_deepspeeds_kernels_do(elements: int) -> None:
    values = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
    values[::3] = 0.0
    values[::5] = -0.0
    packer = NumpyPacker()
    packed = packer.packbits(values, elements, 0)
    # DeepSpeed's kernel: bit 7 - j of byte i is set unless signbit(values[8i + j]), and bits beyond the end are not.
    expected = [0] * ((elements + 7) // 8)
    for k, minus in enumerate(torch.signbit(values).tolist()):
        expected[k // 8] |= (not minus) << (7 - k % 8)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == expected
    unpacked = packer.unpackbits(packed, packed.numel(), 0)
    assert unpacked.dtype == torch.float32
    assert unpacked[:elements].tolist() == torch.where(torch.signbit(values), -1.0, 1.0).tolist()
    assert (unpacked[elements:] == -1).all()


@pytest.mark.skipif(has_deepspeed, reason="deepspeed is installed")
def test_says_what_is_missing() -> None:
    ended = run()
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr == (
        "against_deepspeed.py: deepspeed is not installed, 0.19.6 is needed: pip install 'thinwire[bench]'\n"
    )


@pytest.mark.skipif(not has_deepspeed, reason="needs deepspeed: pip install 'thinwire[bench]'")
@pytest.mark.timeout(SECONDS)
def test_compares_with_deepspeed() -> None:
    ended = run("--ranks", "2", "--elements", "100003", "--repeats", "2")
    assert ended.returncode == 0, ended.stderr
    assert "100,003 elements, 2 local ranks on loopback, medians of 2 turns" in ended.stdout
    assert "MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184" in ended.stdout


def test_refuses_a_single_rank() -> None:
    ended = run("--ranks", "1")
    assert ended.returncode == 2
    assert "expected at least 2 ranks, 2 elements and 2 repeats" in ended.stderr

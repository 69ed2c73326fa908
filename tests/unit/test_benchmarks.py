"""The benchmarks outside the package: they say what they miss, and compare with what they claim to."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.against_deepspeed import NumpyPacker
from tests.testbeds import skip_unless_available

ROOT = Path(__file__).parents[2]
AGAINST_DEEPSPEED = ROOT / "benchmarks" / "against_deepspeed.py"
SECONDS = 300

has_deepspeed = find_spec("deepspeed") is not None


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return execute(str(AGAINST_DEEPSPEED), *arguments)


def module(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return execute("-m", name, *arguments)


def execute(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=ROOT)


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


def test_limit_of_memory(tmp_path: Path) -> None:
    written = tmp_path / "limit.json"
    measured = ["--methods", "birder,cd-adam", "--elements", "100003", "--repeats", "2"]
    ended = module("benchmarks.memory_limit", *measured, "--json", str(written))
    assert ended.returncode == 0, ended.stderr
    assert "updates of 100,003 elements, 4 local ranks" in ended.stdout
    found = {result["method"]: result for result in json.loads(written.read_text())["results"]}
    # fp32: the gradient is read; m, b and x are read and written. Then there are bits, and checks of them.
    assert 28.0 < found["birder"]["bytes_per_parameter"] < 30.0
    # The same for ĝ, x, g̃, m, v and v̂, and a quarter of the mean and of g̃ at the owner.
    assert 4.0 + 6 * 8.0 + 3.0 < found["cd-adam"]["bytes_per_parameter"] < 59.0
    for result in found.values():
        assert result["limit_seconds"] == pytest.approx(result["bytes_per_parameter"] / 12 * result["add_seconds"])
        assert 0 < result["encode_seconds"] + result["apply_seconds"] < result["update_seconds"]


def test_limit_of_memory_refuses_methods_without_a_table_of_bytes() -> None:
    ended = module("benchmarks.memory_limit", "--methods", "birder,sketched-amsgrad")
    assert ended.returncode == 2
    assert "no bytes are known of 'sketched-amsgrad'; choose from birder, onebit-adam," in ended.stderr


def test_cost_of_emulated_links(tmp_path: Path) -> None:
    skip_unless_available()
    written = tmp_path / "cost.json"
    measured = ["--rates", "20mbit", "--turns", "1", "--seconds", "0.5", "--json", str(written)]
    ended = module("benchmarks.link_cost", *measured)
    assert ended.returncode == 0, ended.stderr
    assert "20 Mbit/s" in ended.stdout
    (cost,) = json.loads(written.read_text())["results"]
    assert cost["bytes_per_second"] > 0
    assert cost["slower_by"] == pytest.approx(cost["products_per_second"] / cost["with_streams"] - 1)


def test_cost_of_emulated_links_refuses_what_is_no_rate() -> None:
    ended = module("benchmarks.link_cost", "--rates", "20mbit,fast")
    assert ended.returncode == 2
    assert "--rates" in ended.stderr
    assert "fast" in ended.stderr

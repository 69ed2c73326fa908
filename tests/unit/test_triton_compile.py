"""Every Triton kernel compiles for GPUs that are not here, spills nothing, and rounds as the reference does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.triton_resources import CAPABILITIES
from thinwire.kernels.ops import BACKENDS_OF

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
SECONDS = 600
"""Generous: an idle machine needs half a minute."""
TRITONS = {operation for operation, module in BACKENDS_OF["triton"].items() if module == "triton"}

SUSPECTS = """
import json

import torch
import triton
import triton.language as tl

from benchmarks.triton_resources import collect, compile_all


@triton.jit
def _kernel(x, SIZE: tl.constexpr, HOW: tl.constexpr):
    at = tl.arange(0, SIZE)
    if HOW == "fused":
        y = tl.load(x + at) * 3.0 + tl.load(x + SIZE + at)
    elif HOW == "divided":
        y = tl.load(x + at) / tl.load(x + SIZE + at)
    elif HOW == "rooted":
        y = tl.sqrt(tl.load(x + at))
    elif HOW == "spilled":
        y = tl.load(x + at)
        y *= tl.max(y)
    elif HOW == "wrong":
        y = tl.load(x + at) + tl.arange(0, 2 * SIZE)
    else:
        y = tl.sqrt_rn(tl.div_rn(tl.load(x + at) * 3.0, tl.load(x + SIZE + at)))
    tl.store(x + at, y)


def start(how):
    x = torch.ones(65536)
    size, fused = (8192 if how == "spilled" else 128), how == "fused"
    _kernel[(1,)](x, SIZE=size, HOW=how, num_warps=1 if how == "spilled" else 4, enable_fp_fusion=fused)


ways = ("fine", "fused", "divided", "rooted", "spilled", "wrong")
calls = [*((how, start, {"how": how}) for how in ways), ("nothing", lambda: None, {})]
missing = collect(calls, [90])
rows, failed = compile_all()
print(json.dumps([sorted(missing), failed, {row.operation: row.complaints for row in rows}]))
"""


def run(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """As a user would: without the interpreter, which compiles nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = (sys.executable, *command)
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def compiled(tmp_path: Path, *options: str) -> dict[str, set[int]]:
    """For which GPUs each operation was compiled."""
    found = tmp_path / "found.json"
    ended = run(tmp_path, "-m", "benchmarks.triton_resources", "--quick", "--json", str(found), *options)
    print(ended.stdout)  # registers, memory and spills of each
    assert ended.returncode == 0, ended.stderr
    capabilities: dict[str, set[int]] = defaultdict(set)
    for row in json.loads(found.read_text(encoding="utf-8")):
        capabilities[row["operation"]].add(row["capability"])
        assert 0 < row["registers"] <= 255
    return capabilities


@pytest.mark.long
@pytest.mark.timeout(SECONDS)
def test_all_kernels_compile_without_spills_and_with_exact_rounding(tmp_path: Path) -> None:
    # Sums of several operations are added by one kernel, which counts for the first of them.
    assert compiled(tmp_path) == {operation: set(CAPABILITIES) for operation in TRITONS}


@pytest.mark.timeout(SECONDS)
def test_one_kernel_compiles_without_spills(tmp_path: Path) -> None:
    """The others are left to `make test-all`."""
    assert compiled(tmp_path, "--only", "packet_check", "--capability", "90") == {"packet_check": {90}}


@pytest.mark.timeout(SECONDS)
def test_complains_of_what_would_be_wrong(tmp_path: Path) -> None:
    script = tmp_path / "suspects.py"
    script.write_text(SUSPECTS, encoding="utf-8")
    ended = run(tmp_path, str(script))
    assert ended.returncode == 0, ended.stderr
    missing, (failed,), complaints = json.loads(ended.stdout)
    assert missing == ["nothing"]
    assert failed.startswith("wrong (")
    assert complaints["fine"] == []
    assert complaints["fused"] == ["rounds by fma.rn.f32"]
    assert complaints["divided"] == ["rounds by div.full.f32"]
    assert complaints["rooted"] == ["rounds by sqrt.approx.ftz.f32"]
    assert any(what.startswith("spills") for what in complaints["spilled"])


def test_refuses_to_compile_what_is_interpreted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.triton_resources"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert ended.returncode == 1
    assert "TRITON_INTERPRET is set" in ended.stderr

"""`thinwire bench`: what it prints, not how fast this machine is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from thinwire.cli.app import main; main()", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)


def _results(text: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(text)["results"]}


def test_kernels_as_json() -> None:
    rows = _results(_bench("kernels", "--elements", "65536", "--json").stdout)
    encode = rows["encode"]
    assert encode["baseline"] == "memcpy of fp32"
    traffic = encode["bytes_per_element"] / 8
    assert encode["ratio"] == pytest.approx(encode["baseline_seconds"] / encode["seconds"] * traffic)
    assert rows["apply"]["bar"] == encode["bar"] == 0.9
    assert rows["vote of 8 rows to a bit, by time"]["bar"] == 1.0


def test_kernels_as_a_table_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    printed = _bench("kernels", "--elements", "65536", "--out", str(file)).stdout
    assert "memcpy" in printed
    assert "GB/s" in printed
    assert "encode" in _results(file.read_text(encoding="utf-8"))


def test_exchange_as_json() -> None:
    printed = _bench("exchange", "--ranks", "2", "--elements", "65536", "--repeats", "10", "--batch", "1", "--json")
    memory, update, step = _results(printed.stdout).values()
    assert memory["details"]["bytes_in_tensors_per_parameter"] < 8.6
    assert update["baseline"] == "all_reduce of fp32 + fused AdamW"
    assert update["ratio"] == pytest.approx(update["baseline_value"] / update["value"])
    assert update["details"]["bytes_sent"] > 0
    assert step["baseline"] == "DDP + fused AdamW"

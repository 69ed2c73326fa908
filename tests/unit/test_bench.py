"""`thinwire bench`: what it prints, not how fast this machine is."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import thinwire
from tests.harness import run_ranks
from thinwire.cli import bench_bytes, bench_exchange
from thinwire.cli.app import app
from thinwire.cli.bench import _exchange_table

SECONDS = 150
"""How long ranks may take to measure, which is seconds on an idle machine."""


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from thinwire.cli.app import main; main()", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, check=True)


def _results(text: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(text)["results"]}


def test_kernels_as_json() -> None:
    rows = _results(_bench("kernels", "--elements", "65536", "--json").stdout)
    encode = rows["encode"]
    assert encode["baseline"] == "memcpy of fp32"
    traffic = encode["bytes_per_element"] / 8
    assert encode["ratio"] == pytest.approx(encode["baseline_seconds"] / encode["seconds"] * traffic)
    assert "bar" not in encode
    assert rows["vote of 8 rows to a majority, by time"]["bytes_per_element"] == 9 / 8
    signs = rows["sign encode, time in memcpys"]
    assert (signs["higher_is_better"], signs["bytes_per_element"]) == (False, 12.25)
    assert signs["ratio"] == pytest.approx(signs["seconds"] / signs["baseline_seconds"])
    for name, touched in {
        "sign encode, bf16 memory, time in memcpys": 8.25,
        "sign merge of 8 rows": 9.125,
        "sign apply": 12.125,
        "momentum encode": 20.125,
        "1-bit LAMB, measure": 16.25,
        "dense encode": 8,
        "Adam apply": 28,
        "LAMB, measure and apply": 40,
    }.items():
        assert rows[name]["bytes_per_element"] == touched
        assert rows[name]["seconds"] > 0
    for name, touched in {
        "Markov encode": 12.625,
        "Markov encode of momenta": 20.625,
        "Markov merge of 4 rows": 12.75,
        "AMSGrad apply of signs": 40.25,
        "top-k, k = n/64": 4.0625,
        "sketch add, 5 × n/50": 4.8,
        "sketch top-k, k = n/500": 4.408,
        "CRC-32C of fp32": 4,
    }.items():
        row = rows[f"{name}, time in memcpys"]
        assert (row["bytes_per_element"], row["higher_is_better"]) == (pytest.approx(touched), False)
        assert row["ratio"] == pytest.approx(row["seconds"] / row["baseline_seconds"])


def test_kernels_as_a_table_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    printed = _bench("kernels", "--elements", "65536", "--out", str(file)).stdout
    assert "memcpy" in printed
    assert "GB/s" in printed
    rows = _results(file.read_text(encoding="utf-8"))
    assert rows["encode"]["speedup"] is None
    assert "speed-up" not in printed


def test_kernels_on_several_threads() -> None:
    printed = _bench("kernels", "--elements", "262144", "--threads", "2", "--json").stdout
    assert json.loads(printed)["settings"]["threads"] == 2
    rows = _results(printed)
    slow = {name for name in rows if name.startswith("encode, times faster than")}
    assert {name for name, row in rows.items() if row["speedup"] is None} == slow
    assert all(row["speedup"] > 0 for name, row in rows.items() if name not in slow)
    assert rows["encode"]["ratio"] == pytest.approx(
        rows["encode"]["baseline_seconds"] / rows["encode"]["seconds"] * 20.125 / 8
    )


def test_exchange_as_json() -> None:
    printed = _bench("exchange", "--ranks", "2", "--elements", "65536", "--repeats", "10", "--batch", "1", "--json")
    memory, update, step = _results(printed.stdout).values()
    assert memory["details"]["bytes_in_tensors_per_parameter"] < 8.6
    assert update["baseline"] == "all_reduce of fp32 + fused AdamW"
    assert update["ratio"] == pytest.approx(update["baseline_value"] / update["value"])
    assert update["details"]["bytes_sent"] > 0
    assert step["baseline"] == "DDP + fused AdamW"


def measured(rank: int, world_size: int, optimizer: str, elements: int) -> list[dict[str, Any]]:
    plan = bench_exchange.ExchangeConfig(optimizer, elements, 2, 1, None, None)
    return [asdict(row) for row in bench_exchange.measure(lambda _: None, plan)]


# Each of these trains a model of 7 million parameters, for seconds: some of them in `make test-all` only. What all of
# them send in these stages is also a test of `bench step`, with a small model.
@pytest.mark.parametrize(
    ("optimizer", "bytes_allowed"),
    [
        ("onebit-adam", 13),
        pytest.param("zero-one-adam", 17, marks=pytest.mark.long),
        pytest.param("onebit-lamb", 21, marks=pytest.mark.long),
    ],
)
def test_exchange_in_the_compressed_stage(optimizer: str, bytes_allowed: int) -> None:
    elements = 1 << 20
    memory, update, step = run_ranks(measured, 2, optimizer, elements, timeout=SECONDS)[0]
    assert "bar" not in memory
    # What is resident of so few elements is noise, but all tensors are known, those that were never touched included.
    assert bytes_allowed - 2 < memory["details"]["bytes_in_tensors_per_parameter"] < bytes_allowed + 10
    assert update["ratio"] == pytest.approx(update["baseline_value"] / update["value"])
    # Signs and scales only: there was no dense step among those that were measured.
    assert 1.0 < update["details"]["bytes_sent"] / (elements / 8) < 1.01
    assert 1.0 < step["details"]["bytes_sent"] / (7_173_888 / 8) < 1.02


@pytest.mark.parametrize(
    ("optimizer", "bytes_allowed", "bits"),
    [
        ("cd-adam", 21 + 4 / 2, 65 / 64),
        pytest.param("cd-adam-topk", 26 + 4 / 2, 1, marks=pytest.mark.long),
        ("sketched-amsgrad", 22, 32 * (5 / 50 + 2 / 100)),
    ],
)
def test_exchange_of_optimizers_that_always_compress(optimizer: str, bytes_allowed: float, bits: float) -> None:
    elements = 1 << 20
    memory, update, step = run_ranks(measured, 2, optimizer, elements, timeout=SECONDS)[0]
    # What is held beside state and packets counts too: gradients to be fetched, differences to be encoded, and the
    # answer of a bucket, which is the whole model here.
    assert memory["details"]["bytes_in_tensors_per_parameter"] == pytest.approx(bytes_allowed, abs=1.5)
    assert update["ratio"] == pytest.approx(update["baseline_value"] / update["value"])
    assert 1.0 < update["details"]["bytes_sent"] / (bits * elements / 8) < 1.01
    assert 1.0 < step["details"]["bytes_sent"] / (bits * 7_173_888 / 8) < 1.02


def test_exchange_of_compressed_averages() -> None:
    elements, bits = 1 << 20, 4.25
    memory, average, step = run_ranks(measured, 2, "compress-int4", elements, timeout=SECONDS)[0]
    # A residual of 4 bytes, half as many for the shards that one of two ranks owns, and packets.
    assert memory["name"] == "peak memory beyond DDP's and AdamW's"
    assert memory["details"]["bytes_in_tensors_per_parameter"] == pytest.approx(4 + 2 + 3 * bits / 2 / 8, abs=0.5)
    assert average["baseline"] == "all_reduce of fp32"
    assert 1.0 < average["details"]["bytes_sent"] / (bits * elements / 8) < 1.01
    assert 1.0 < step["details"]["bytes_sent"] / (bits * 7_173_888 / 8) < 1.02


def test_the_table_of_an_exchange_is_about_the_optimizer() -> None:
    row = bench_exchange.ExchangeResult("update", 0.05, "s", "AdamW", 0.1, 2.0, True, {"encode_seconds": 0.01})
    console = Console(file=io.StringIO(), width=200)
    console.print(_exchange_table("0/1 Adam", 4, [row]))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0/1 Adam between 4 local ranks" in printed
    assert "where 0/1 Adam's time went" in printed
    assert "Birder" not in printed
    assert "50.0 ms" in printed
    assert "MISSED" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--optimizer", "sgd"],
            "unknown optimizer 'sgd'; there are: birder, onebit-adam, onebit-adam-4bit, zero-one-adam, onebit-lamb, "
            "cd-adam, cd-adam-topk, sketched-amsgrad",
        ),
        (["--optimizer", "onebit-lamb", "--downlink", "votes"], "only birder votes: onebit-lamb has no downlink"),
    ],
)
def test_bad_arguments_of_exchange(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "exchange", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert message in re.sub(r"\s+", " ", result.output)


# Bytes over a whole run -----------------------------------------------------------------------------------------------


def counted(rank: int, world_size: int) -> dict[str, Any]:
    schedule = {"var_freeze_step": 4, "var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 2}
    run = bench_bytes.CountedRun("0/1 Adam", thinwire.ZeroOneAdam, schedule, steps=21)
    return asdict(bench_bytes._count(lambda _: None, run, elements=1 << 16))


def test_bytes_of_a_run_are_those_of_its_steps() -> None:
    row, *others = run_ranks(counted, 3)
    assert all(other == row for other in others)
    # Steps 1, 2 and 4 are dense, 3 and then 5 to 8 signs, and from 10 on every second, the last one by force.
    assert (row["dense_steps"], row["silent_steps"]) == (3, 6)
    assert row["baseline_bytes"] == pytest.approx(21 * 2 * 2 / 3 * 4 * 65536)
    assert row["ratio"] == row["bytes_sent"] / row["baseline_bytes"]
    assert row["ratio"] == pytest.approx((3 + (21 - 3 - 6) / 32) / 21, rel=0.02)


def test_lengths_of_whole_runs() -> None:
    long, short = bench_bytes.runs(10_000), bench_bytes.runs(500)
    assert [run.steps for run in long] == [1000, 1000, 10_000, 1000, 1000]
    onebit, quantised, _, *others = short
    assert [(run.label, run.steps) for run in others] == [("CD-Adam", 50), ("SketchedAMSGrad", 50)]
    assert (onebit.settings["warmup_steps"], onebit.settings["warmup_bits"]) == (8, None)
    assert quantised.settings["warmup_steps"] == 15


def test_bytes_as_a_table_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "bytes.json"
    printed = _bench("bytes", "--ranks", "2", "--elements", "65536", "--steps", "200", "--out", str(file)).stdout
    assert "Bytes over whole runs, 65,536 parameters, 2 local ranks" in printed
    rows = _results(file.read_text(encoding="utf-8"))
    onebit = rows["1-bit Adam, 15 % warm-up"]
    assert (onebit["steps"], onebit["dense_steps"], onebit["silent_steps"]) == (20, 3, 0)
    assert onebit["ratio"] == pytest.approx(0.15 + 0.85 / 32, rel=0.02)
    quantised = rows["1-bit Adam, 4-bit warm-up of 30 %"]
    assert quantised["ratio"] == pytest.approx((0.3 * 4.25 + 0.7) / 32, rel=0.03)
    zero_one = rows["0/1 Adam"]
    # 16 steps in a row, 16 two apart, 16 four apart, and those eight apart up to 200.
    assert (zero_one["steps"], zero_one["dense_steps"]) == (200, 16 + 16 + 16 + 11)
    # The first step of CD-Adam says hello before.
    for name, ratio in {"CD-Adam": 21 / 20 / 32, "SketchedAMSGrad": 5 / 50 + 2 / 100}.items():
        row = rows[name]
        assert (row["steps"], row["dense_steps"], row["silent_steps"]) == (20, 0, 0)
        # Shards of so short a sketch are padded to whole words by some percent.
        assert row["ratio"] == pytest.approx(ratio, rel=0.04)

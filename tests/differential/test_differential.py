"""Random configurations, new ones every time, and whether a difference would be noticed."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.differential.configurations import GRIDS, WAYS, configuration
from thinwire.averaging.catalogue import NAMES
from thinwire.cli.registry import OPTIMIZERS

ROOT = Path(__file__).parents[2]
CONFIGURATIONS = 50


def run(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.differential", *map(str, options)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)


def test_all_ways_give_the_same_bits() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"--seed {seed}")
    done = run("--configurations", CONFIGURATIONS, "--seed", seed)
    assert done.returncode == 0, f"--seed {seed}\n{done.stdout}{done.stderr}"
    assert f"{CONFIGURATIONS} configurations, 0 of them failed" in done.stdout


def test_a_single_bit_is_noticed_and_its_command_repeats_it(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    for way in WAYS:
        done = run("--configurations", 3, "--seed", 5, "--perturb", way, "--results", results)
        assert done.returncode == 1, done.stdout + done.stderr
        lines = [json.loads(line) for line in results.read_text().splitlines()]
        assert [line["number"] for line in lines] == [0, 1, 2]
        # Local steps have no DDP.
        wrong = [line for line in lines if way in configuration(5, line["number"]).ways]
        assert wrong
        assert all(f"{way}" in line["wrong"] and "after step 1" in line["wrong"] for line in wrong)
        command = re.findall(r"python -m tests\.differential (.*)", done.stdout)[0]
        again = run(*shlex.split(command))
        assert again.returncode == 1
        assert wrong[0]["wrong"] in again.stdout
        results.unlink()


def test_a_second_call_continues(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    assert run("--configurations", 2, "--seed", 3, "--results", results).returncode == 0
    whole = results.read_text()
    # As if it had been killed while it wrote a third line.
    results.write_text(whole + '{"seed": 3, "num')
    done = run("--configurations", 3, "--seed", 3, "--results", results)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 configurations, 0 of them failed" in done.stdout
    assert "1 configurations in" in done.stdout
    assert results.read_text().startswith(whole)
    assert [json.loads(line)["number"] for line in results.read_text().splitlines()] == [0, 1, 2]
    other = run("--configurations", 1, "--seed", 4, "--results", results)
    assert other.returncode == 1
    assert "has results of --seed 3, not 4" in other.stderr


def test_everything_is_drawn() -> None:
    drawn = [configuration(0, number) for number in range(2000)]
    assert drawn == [configuration(0, number) for number in range(2000)]
    assert {each.grid for each in drawn} == set(GRIDS)
    assert {each.subject for each in drawn if each.kind == "optimizer"} == set(OPTIMIZERS)
    for kind in ("compress", "local"):
        assert {each.subject for each in drawn if each.kind == kind} == set(NAMES)
    assert os.environ.get("THINWIRE_KERNELS") is None, "the ways choose their kernels themselves"

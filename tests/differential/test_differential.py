"""Random configurations, new ones every time, and whether a difference would be noticed."""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.differential.__main__ import main
from tests.differential.configurations import GRIDS, WAYS, configuration
from tests.differential.pool import Pool
from thinwire.averaging.catalogue import NAMES
from thinwire.cli.registry import OPTIMIZERS

ROOT = Path(__file__).parents[2]
CONFIGURATIONS = 50


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(600)  # on a machine that is busy with other tests; it computes for half a minute
def test_all_ways_give_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    code = main(["--configurations", str(CONFIGURATIONS), "--seed", str(seed)])
    told = capsys.readouterr().out
    print(f"--seed {seed}")
    assert code == 0, f"--seed {seed}\n{told}"
    assert f"{CONFIGURATIONS} configurations, 0 of them failed" in told


@pytest.mark.parametrize("way", WAYS)
def test_a_single_bit_is_noticed(way: str, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    assert main(["--configurations", "3", "--seed", "5", "--perturb", way, "--results", str(results)]) == 1
    drawn = [configuration(5, number) for number in range(3)]
    assert [line["number"] for line in lines(results)] == [0, 1, 2]
    for line, each in zip(lines(results), drawn, strict=True):
        # Local steps have no DDP.
        assert bool(line["wrong"]) == (way in each.ways)
        assert not line["wrong"] or (way in str(line["wrong"]) and "after step 1" in str(line["wrong"]))


def test_the_command_of_a_failure_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--configurations", "1", "--seed", "5", "--perturb", "virtual"]) == 1
    told = capsys.readouterr().out
    (found,) = re.findall(r"^.* have other .*$", told, re.MULTILINE)
    (command,) = re.findall(r"^python (-m tests\.differential .*)$", told, re.MULTILINE)
    again = subprocess.run(
        [sys.executable, *shlex.split(command)], cwd=ROOT, capture_output=True, text=True, timeout=170, check=False
    )
    assert again.returncode == 1
    assert found in again.stdout


def test_what_ranks_raise_is_told_and_new_ones_take_their_place() -> None:
    fine = next(each for each in (configuration(5, number) for number in range(100)) if each.grid == "2")
    with Pool() as pool:
        assert pool.check(fine) == ""
        assert "Error" in pool.check(replace(fine, subject="no such thing"))
        assert pool.check(fine) == ""


def test_a_second_call_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.jsonl"
    arguments = ["--results", str(results), "--configurations"]
    assert main([*arguments, "2", "--seed", "3"]) == 0
    whole = results.read_text()
    # As if it had been killed while it wrote a third line.
    results.write_text(whole + '{"seed": 3, "num')
    capsys.readouterr()
    assert main([*arguments, "3", "--seed", "3"]) == 0
    told = capsys.readouterr().out
    assert "3 configurations, 0 of them failed" in told
    assert "1 configurations in" in told
    assert results.read_text().startswith(whole)
    assert [line["number"] for line in lines(results)] == [0, 1, 2]
    with pytest.raises(SystemExit, match="has results of --seed 3, not 4"):
        main([*arguments, "3", "--seed", "4"])


def test_everything_is_drawn() -> None:
    drawn = [configuration(0, number) for number in range(2000)]
    assert drawn == [configuration(0, number) for number in range(2000)]
    assert {each.grid for each in drawn} == set(GRIDS)
    assert {each.subject for each in drawn if each.kind == "optimizer"} == set(OPTIMIZERS)
    for kind in ("compress", "local"):
        assert {each.subject for each in drawn if each.kind == kind} == set(NAMES)

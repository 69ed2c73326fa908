"""A short run of the fuzzer, and whether it would notice."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import __main__ as command
from tests.fuzz.__main__ import main
from tests.fuzz.memory import Fences
from tests.fuzz.packets import Packets, crc32c
from tests.fuzz.runner import MOST_FINDINGS, Account, input_of, read, run_again, run_inputs

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("inputs", "seed"),
    [(1000, 1), pytest.param(10_000, random.SystemRandom().randrange(2**32), marks=pytest.mark.long)],
    ids=["repeatable", "new every time"],
)
def test_every_input_has_an_expected_outcome(inputs: int, seed: int, tmp_path: Path) -> None:
    options = {"--inputs": inputs, "--seed": seed, "--findings": tmp_path}
    command = [sys.executable, "-m", "tests.fuzz", *(str(word) for option in options.items() for word in option)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, f"--seed {seed}\n{done.stdout}{done.stderr}"
    assert f"{inputs:,} inputs" in done.stdout
    for outcome in ("refused: checksum", "taken", "refused: CorruptCheckpoint, an accident", "a forgery that is data"):
        assert outcome in done.stdout, f"--seed {seed}\n{done.stdout}"


def test_a_second_call_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CHUNK", 40)
    results = tmp_path / "results.json"
    arguments = ["--seed", "2", "--only", "packets", "--results", str(results)]
    assert main([*arguments, "--inputs", "60"]) == 0
    first = json.loads(results.read_text())
    assert main([*arguments, "--inputs", "100"]) == 0
    second = json.loads(results.read_text())
    whole = run_inputs(Packets, 2, 100)
    assert (first["targets"]["packets"]["inputs"], second["targets"]["packets"]["inputs"]) == (60, 100)
    assert second["targets"]["packets"]["outcomes"] == dict(whole.outcomes)
    assert second["targets"]["packets"]["seconds"] >= first["targets"]["packets"]["seconds"]
    with pytest.raises(SystemExit, match="has results of --seed 2, not 3"):
        main([*arguments, "--seed", "3"])


@settings(deadline=None, max_examples=100)
@given(st.randoms(use_true_random=False))
def test_packets_that_hypothesis_makes_smaller_when_one_fails(draw: random.Random) -> None:
    target = Packets()
    assert target.run(target.make(draw)) in target.outcomes


def test_the_second_reading_of_the_protocol_has_the_checksum_of_the_book() -> None:
    assert crc32c(b"123456789") == 0xE3069283


# Whether it would notice ---------------------------------------------------------------------------------------------


class Broken:
    """Inputs are their numbers, of which some do what they must not."""

    name = "broken"
    share = 1.0
    outcomes: tuple[str, ...] = ("fine",)

    def make(self, draw: random.Random) -> bytes:
        return draw.randbytes(8)

    def run(self, data: bytes) -> str:
        if data == input_of(self, 3, 5):
            os.kill(os.getpid(), signal.SIGSEGV)
        if data == input_of(self, 3, 8):
            raise KeyError("no such thing")
        if data == input_of(self, 3, 11):
            os._exit(1)
        if data == input_of(self, 3, 14):
            time.sleep(1000)
        return "fine"


class AlwaysWrong(Broken):
    def run(self, data: bytes) -> str:
        raise ValueError("always")


class SaysSomethingElse(Broken):
    def run(self, data: bytes) -> str:
        return "something else"


def told(account: Account) -> dict[int, str]:
    return {finding.number: finding.what for finding in account.findings}


def test_crashes_hangs_and_exceptions_are_counted_and_the_rest_is_run(tmp_path: Path) -> None:
    account = run_inputs(Broken, 3, 20, hang_seconds=3.0)
    assert told(account) == {
        5: "ends the process by SIGSEGV",
        8: "raises KeyError: 'no such thing'",
        11: "ends the process with exit code 1",
        14: "hangs",
    }
    assert account.outcomes == {"fine": 16}
    assert account.inputs == 20
    for finding in account.findings:
        again = run_again(Broken, read(finding.write(tmp_path)), hang_seconds=3.0)
        assert again.findings[0].what == finding.what
        assert again.inputs == 1


def test_a_target_that_is_always_wrong_is_given_up() -> None:
    assert len(run_inputs(AlwaysWrong, 3, 1000).findings) == MOST_FINDINGS


def test_an_outcome_that_nobody_expects_is_a_finding() -> None:
    assert told(run_inputs(SaysSomethingElse, 3, 1)) == {0: "raises KeyError: 'something else'"}


def test_a_file_is_replayed_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "input.fuzz"
    file.write_bytes(b'{"target": "packets", "seed": 1, "number": 0, "what": "", "details": ""}\nx')
    assert main(["--replay", str(file)]) == 1
    assert "raises error: unpack_from requires a buffer" in capsys.readouterr().out


class Trespassing(Broken):
    """Reads, or writes, a byte outside of a tensor of that many bytes."""

    size, at, writes = 0, 0, False

    def run(self, data: bytes) -> str:
        fences = Fences()
        tensor = fences.zeros(self.size, torch.uint8)
        if self.writes:
            ctypes.memset(tensor.data_ptr() + self.at, 7, 1)
        else:
            ctypes.string_at(tensor.data_ptr() + self.at, 1)
        fences.check()
        return "fine"


@pytest.mark.parametrize("size", [1, 7, 4096, 5000])
def test_fences_end_who_goes_too_far(size: int) -> None:
    """By a single byte behind the end; what is written in front is seen afterwards."""

    def outcome(at: int, *, writes: bool) -> str:
        target = type("Trespassing", (Trespassing,), {"size": size, "at": at, "writes": writes})
        account = run_inputs(target, 3, 1)
        return account.findings[0].what if account.findings else "fine"

    segfault = "ends the process by SIGSEGV"
    for writes in (False, True):
        assert outcome(0, writes=writes) == outcome(size - 1, writes=writes) == "fine"
        assert outcome(size, writes=writes) == segfault
    in_front = "raises AssertionError: a kernel has written in front of its memory"
    assert outcome(-1, writes=True) == (in_front if size % mmap.PAGESIZE else segfault)

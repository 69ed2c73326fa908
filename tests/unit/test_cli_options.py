"""Options of all commands: a wrong number or an impossible file is an error of one line, before any work begins."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import typer
from typer.testing import CliRunner

import thinwire
from thinwire.cli.app import app
from thinwire.kernels import native

REQUIRED = {"selftest": ("--device", "cpu"), "testbed run": ("true",)}
"""What a command needs beside the option that is wrong."""
ZERO_IS_RIGHT = {"--seed", "--minutes", "--rejoin", "--spread"}


def commands(group: typer.Typer, names: tuple[str, ...] = ()) -> Iterator[tuple[str, Callable[..., Any]]]:
    """All commands by their names, and the functions behind them."""
    for command in group.registered_commands:
        assert command.callback is not None
        yield " ".join((*names, command.name or command.callback.__name__)), command.callback
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from commands(inner.typer_instance, (*names, str(inner.name)))


COMMANDS = dict(commands(app))


def options(*kinds: type) -> list[tuple[str, str]]:
    """Command and option of all options of these types."""
    return [
        (command, "--" + name.replace("_", "-"))
        for command, function in COMMANDS.items()
        for name, kind in get_type_hints(function).items()
        if kind in kinds or set(get_args(kind)) & set(kinds)
    ]


NUMBERS = options(int, float)
FLOATS = options(float)


def invoke(command: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output, in one line."""
    words = [*command.split(), *arguments, *REQUIRED.get(command, ())]
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = set(children.read_text().split())
    result = CliRunner().invoke(app, words, env={"COLUMNS": "1000", "NO_COLOR": "1"})
    assert set(children.read_text().split()) <= before  # those of earlier tests may have ended
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, re.sub(r"[\s│]+", " ", result.output)


def test_all_commands_are_known() -> None:
    assert set(COMMANDS) == {
        *("demo", "bench kernels", "bench exchange", "bench bytes", "bench step", "testbed run", "testbed clean"),
        *("chaos", "soak", "selftest", "study", "plan"),
        *("simulate papers", "simulate commit", "simulate buckets"),
    }
    assert len(NUMBERS) >= 30


@pytest.mark.parametrize(("command", "option"), NUMBERS)
def test_wrong_numbers_are_refused(command: str, option: str) -> None:
    wrong = ["-1", "-" + "9" * 30, "9" * 30]
    if option not in ZERO_IS_RIGHT:
        wrong.append("0")
    if (command, option) in FLOATS:
        wrong += ["nan", "inf", "-inf", "1e300"]
    for value in wrong:
        code, output = invoke(command, f"{option}={value}")
        assert code == 2, output
        told = re.search(rf"Invalid value for '?{option}'?: (.*)", output)
        assert told is not None, output
        # Python writes large floats otherwise than they were given.
        assert value in told[1] or str(float(value)) in told[1], output
        assert re.search(r"at least|at most|from .* to|1 to 254", told[1]), output


@pytest.mark.parametrize("buckets", ["0", "-1", "nan", "inf", "1e300", "1e-300", "1,,2", "9" * 30])
def test_wrong_bucket_sizes_are_refused(buckets: str) -> None:
    code, output = invoke("bench step", "--buckets", buckets)
    assert code == 2
    assert "--buckets: must be numbers of MB" in output


@pytest.mark.parametrize("command", ["bench kernels", "bench exchange", "bench bytes"])
def test_more_elements_than_memory_are_refused(command: str) -> None:
    code, output = invoke(command, "--elements", "50000000000")
    assert code == 2
    assert re.search(r"'--elements': must be at most [\d,]+ .* memory, got 50,000,000,000", output), output


READ = {"--data", "--from-json", "--text", "--pictures"}
FILES = [(command, option) for command, option in options(Path) if option not in READ and option != "--output"]


def test_all_files_are_known() -> None:
    assert set(FILES) == {
        *(("demo", "--out"), ("demo", "--json"), ("bench kernels", "--out"), ("bench exchange", "--out")),
        *(("bench bytes", "--out"), ("bench step", "--json"), ("bench step", "--html"), ("bench step", "--png")),
        *(("chaos", "--json"), ("soak", "--json"), ("selftest", "--json")),
        *(("plan", "--json"), ("plan", "--html"), ("plan", "--report"), ("simulate papers", "--figure")),
    }


@pytest.mark.parametrize(("command", "option"), FILES)
def test_files_that_cannot_be_written_are_refused(tmp_path: Path, command: str, option: str) -> None:
    (tmp_path / "file").write_text("here")
    (tmp_path / "[").mkdir()
    for impossible in (
        *(
            tmp_path / "file" / "below",
            tmp_path / "missing" / "below",
            tmp_path / ("x" * 300),
            tmp_path / "[" / "]" / "x",
        ),
        *(Path("/proc/below"), Path("/proc/self/below")),
    ):
        code, output = invoke(command, option, str(impossible))
        assert code == 2, output
        assert re.search(rf"Invalid value for '?{option}'?: ", output), output
        assert str(impossible) in output, output
    code, output = invoke(command, option, str(tmp_path))
    assert code == 2
    assert "is a directory" in output
    assert (tmp_path / "file").read_text() == "here"


def test_checking_a_file_leaves_it_as_it_was(tmp_path: Path) -> None:
    existing, missing = tmp_path / "existing", tmp_path / "missing"
    existing.write_text("results of last week")
    for path in (existing, missing):
        # The other option is wrong, so nothing is done after the check.
        code, _ = invoke("soak", "--json", str(path), "--steps", "0")
        assert code == 2
    assert existing.read_text() == "results of last week"
    assert not missing.exists()


@pytest.mark.parametrize("only_report", [False, True])
def test_a_study_needs_a_folder_that_it_can_write(tmp_path: Path, only_report: bool) -> None:
    (tmp_path / "file").write_text("here")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "text").write_text("no folder")
    flags = ("--report",) if only_report else ()
    impossible = [tmp_path / "file", tmp_path / "file" / "below", tmp_path / "results", Path("/proc/below")]
    for folder in impossible[: 2 if only_report else 4]:
        code, output = invoke("study", "--task", "text", "--method", "adamw", "--output", str(folder), *flags)
        assert code == 2, output
        assert re.search(r"Invalid value for '?--output'?: cannot write to the folder", output), output
        assert str(folder) in output, output


def test_names_of_files_are_printed_as_they_are(tmp_path: Path) -> None:
    """Rich takes [red] for a colour, and fails at an end [/] without a beginning."""
    folder = tmp_path / "[" / "] [red]"
    code, output = invoke("study", "--report", "--output", str(folder))
    assert code == 0, output
    assert "[/] [red]" in output


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_the_version_names_the_kernels_and_torch(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setenv("THINWIRE_KERNELS", kernels)
    monkeypatch.delenv("THINWIRE_ISA", raising=False)
    code, output = invoke("--version")
    of_isa = f" ({native.isa()})" if kernels == "native" else ""
    assert code == 0
    assert output == f"thinwire {thinwire.__version__}, {kernels} kernels{of_isa}, torch {torch.__version__} "


def test_the_version_says_which_setting_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_KERNELS", "natvie")
    code, output = invoke("--version")
    assert code == 2
    assert "THINWIRE_KERNELS='natvie': expected one of native, reference, triton" in output

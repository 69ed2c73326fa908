"""`thinwire demo`: short real runs, two of them through the installed script; what it says, also to bad input."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from tests.harness import run_ranks
from tests.testbeds import namespaces_of, skip_unless_available
from thinwire.cli.app import app
from thinwire.cli.averagings import contender, contenders
from thinwire.cli.charlm import Corpus, ModelShape
from thinwire.cli.comparison.live import LiveView
from thinwire.cli.comparison.network import Network
from thinwire.cli.comparison.pace import Budget, PredictedClock
from thinwire.cli.comparison.picture import drawn
from thinwire.cli.comparison.report import lines_for_scripts, print_comparison
from thinwire.cli.comparison.results import Comparison
from thinwire.cli.comparison.training import StepSeconds, TrainingConfig, TrainingProgress, TrainingResult, train
from thinwire.cli.registry import ADAMW, RECOMMENDED
from thinwire.cli.schedule import is_due, learning_rate_factor
from thinwire.optimizers.local_steps import local_interval

SCRIPT = Path(sysconfig.get_path("scripts"), "thinwire")
TINY = ("--layers", "1", "--width", "32", "--context", "16", "--batch", "2")


def run_script(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # Wide, so that no message is broken into lines; no colours, whatever the machine that runs the tests asks for.
    environment = {key: value for key, value in os.environ.items() if key not in {"FORCE_COLOR", "GITHUB_ACTIONS"}}
    with subprocess.Popen(
        [SCRIPT, *arguments],
        cwd=folder,
        env=environment | {"COLUMNS": "200"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as script:
        try:
            output, errors = script.communicate(timeout=150)
        finally:
            script.kill()  # if it takes too long
    # Its own only: other tests make testbeds whose owners are gone.
    assert namespaces_of(script.pid) == []
    return subprocess.CompletedProcess(arguments, script.returncode, output, errors)


@pytest.fixture
def run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_ranks: None
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """As `run_script`, without new interpreters: the command runs in this process, its workers are forked."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        without = {"FORCE_COLOR": None, "GITHUB_ACTIONS": None}
        result = CliRunner().invoke(app, arguments, env={**without, "COLUMNS": "200", **variables})
        return subprocess.CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr)

    return run


def results_of(folder: Path, finished: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    assert "\x1b" not in finished.stdout
    assert (folder / "thinwire-demo.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((folder / "results.json").read_text())
    assert results["sentence"] in finished.stdout
    for run in (results["baseline"], results["challenger"]):
        assert run["ranks"] == 2
        assert run["steps"] == len(run["training_losses"]) == len(run["cumulative_seconds"])
        assert math.isfinite(run["validation_loss"])
        assert run["seconds"]["step"] > 0
        assert run["cumulative_bytes"] == sorted(run["cumulative_bytes"])
    # The same model and the same data: before the first update the two runs are one.
    losses = [results[role]["training_losses"] for role in ("baseline", "challenger")]
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] != losses[1][1]
    return results


def test_short_run_over_loopback(tmp_path: Path) -> None:
    votes = ("--optimizer", "birder", "--downlink", "votes")
    loopback = ("--rate", "unlimited", "--ranks", "2", "--steps", "3", "--json", "results.json")
    finished = run_script(tmp_path, "demo", *votes, *loopback, *TINY)
    results = results_of(tmp_path, finished)
    assert "2 workers over loopback." in finished.stdout
    assert "validation loss" in finished.stdout
    assert "theoretical" in finished.stdout
    assert (
        "    opt = thinwire.Birder(model.parameters(), lr=0.004, weight_decay=0.1, downlink='votes')" in finished.stdout
    )

    baseline, challenger = results["baseline"], results["challenger"]
    assert (results["links"], results["no_emulated_links_because"]) == ("loopback", None)
    assert baseline["steps"] == challenger["steps"] == 3
    assert baseline["bytes_sent_source"] == "theoretical"
    assert baseline["bytes_sent_per_step"] == pytest.approx(4 * baseline["parameters"])
    assert challenger["bytes_sent_source"] == "counted"
    assert challenger["settings"]["downlink"] == "votes"
    assert challenger["metrics"]["steps"] == 3
    assert challenger["metrics"]["bytes_sent"] == challenger["cumulative_bytes"][-1]
    assert challenger["bytes_sent_per_step"] < baseline["bytes_sent_per_step"]


def step_seconds(run: dict[str, Any]) -> list[float]:
    return [after - before for before, after in pairwise([0.0, *run["cumulative_seconds"]])]


def test_short_run_over_slow_links(tmp_path: Path) -> None:
    skip_unless_available()
    slow = ("--rate", "2mbit", "--ranks", "2", "--seconds", "1.5", "--json", "results.json")
    finished = run_script(tmp_path, "demo", "--optimizer", "birder", *slow, *TINY)
    results = results_of(tmp_path, finished)
    assert "2 hosts on this machine, each with a link of 2 Mbit/s." in finished.stdout
    assert "predicted" not in finished.stdout

    baseline, challenger = results["baseline"], results["challenger"]
    assert results["links"] == "emulated"
    for run in (baseline, challenger):
        assert run["bytes_sent_source"] == "counted at the interface"
        assert run["cumulative_seconds"][-1] == pytest.approx(1.5, abs=max(step_seconds(run)))
    # All floats twice over half of the wire, and the headers of frames.
    assert 1.0 < baseline["bytes_sent_per_step"] / (4 * baseline["parameters"]) < 1.3
    # The link is as slow as it claims to be. Some frames leave while workers validate.
    assert baseline["seconds"]["mean_step"] > 0.75 * 8 * baseline["bytes_sent_per_step"] / 2e6
    # The fastest of each: a busy machine may make any single step slow, and leave time for few.
    assert min(step_seconds(challenger)) < min(step_seconds(baseline))
    assert challenger["bytes_sent_per_step"] < baseline["bytes_sent_per_step"] / 5


def test_where_there_are_no_slow_links_times_are_predicted(
    tmp_path: Path, run_here: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    slow = ("--rate", "1mbit", "--ranks", "2", "--seconds", "6", "--json", "results.json")
    finished = run_here("demo", "--compressor", "int4", *slow, *TINY, PATH=str(empty))
    results = results_of(tmp_path, finished)
    (announced,) = (line for line in finished.stdout.splitlines() if "No links" in line)
    assert announced.startswith("No links of 1 Mbit/s here: a testbed needs ")
    assert announced.endswith(". Training over loopback; times at 1 Mbit/s are predicted.")
    assert "training time, predicted" in finished.stdout
    assert re.search(r"^DDP \+ AdamW: [56]\.\d s predicted, \d+ steps", finished.stdout, re.MULTILINE)
    assert results["sentence"].startswith("Predicted for 1 Mbit/s, not measured: ")
    assert '    thinwire.compress(model, "int4")' in finished.stdout

    baseline, challenger = results["baseline"], results["challenger"]
    assert results["links"] == "predicted"
    assert results["no_emulated_links_because"] in announced
    # Each step takes what its bytes need, whatever it took on this machine.
    assert baseline["clock"]["compute"] == challenger["clock"]["compute"]
    for run in (baseline, challenger):
        clock = PredictedClock(**run["clock"])
        times = step_seconds(run)
        sent = [after - before for before, after in pairwise([0.0, *run["cumulative_bytes"]])]
        assert times == pytest.approx([clock.step_seconds(count) for count in sent])
        assert run["cumulative_seconds"][-1] == pytest.approx(6, abs=2 * max(times))
    assert challenger["steps"] > 2 * baseline["steps"]


def test_a_text_of_ones_own_and_a_single_worker(
    tmp_path: Path, run_here: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Grüße aus dem Süden. " * 40, encoding="utf-8")
    alone = ("--ranks", "1", "--seconds", "0.1", "--rate", "unlimited", "--out", "own.png")
    finished = run_here("demo", "--data", str(text), *alone, *TINY)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    assert "840 characters" in finished.stdout
    assert (tmp_path / "own.png").stat().st_size > 0


def test_bad_input_through_the_script(tmp_path: Path) -> None:
    finished = run_script(tmp_path, "demo", "--data", "missing.txt")
    assert finished.returncode == 2
    assert "missing.txt" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "missing.txt"], "'missing.txt' does not exist"),
        (["--data", "short.txt"], "the text has 5 characters; a context of 64 needs at least 651"),
        (["--data", "binary.txt"], "'binary.txt' is not UTF-8 text"),
        (["--data", "."], "is a directory"),
        (["--ranks", "0"], "'--ranks': must be at least 1, got 0"),
        (["--ranks", "many"], "'--ranks'"),
        (["--steps", "0"], "'--steps': must be at least 1, got 0"),
        (["--steps", "-3"], "'--steps': must be at least 1, got -3"),
        (["--batch", "0"], "'--batch': must be at least 1, got 0"),
        (["--seed", "-1"], "'--seed': must be at least 0, got -1"),
        (["--width", "33"], "'--width': width must be a multiple of 32 (the width of a head), got 33"),
        (["--optimizer", "sgd"], "'--optimizer': unknown optimizer 'sgd'; there are: birder, onebit-adam,"),
        (["--compressor", "int5"], "'--compressor': unknown compressor 'int5'; there are: int8, int4, int3, int2,"),
        (
            ["--compressor", "int4", "--optimizer", "birder"],
            "--compressor: give either --optimizer or --compressor, got 'birder' and 'int4'",
        ),
        (["--rate", "fast"], "'--rate': rate must be like '100mbit' or '1gbit' (1kbit to 1tbit), or 'unlimited'"),
        (["--ranks", "255"], "'--ranks': hosts must be 1 to 254, got 255"),
        (["--seconds", "0"], "'--seconds': must be a number from 0.1 to 86400, got 0"),
        (["--seconds", "5", "--steps", "3"], "--steps: give either --seconds or --steps, got 5 and 3"),
        (
            ["--optimizer", "onebit-adam", "--downlink", "bit"],
            "'--downlink': only birder votes: onebit-adam has no downlink to choose, but got 'bit'",
        ),
        (["--downlink", "carrier-pigeon"], "'carrier-pigeon' is not one of 'bit', 'majority', 'votes'"),
        (["--out", "nowhere/picture.png"], "cannot write 'nowhere/picture.png': there is no writable folder 'nowhere'"),
        (["--json", "nowhere/results.json"], "cannot write 'nowhere/results.json'"),
    ],
)
def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("short")
    Path("binary.txt").write_bytes(b"\xff\xfe\x00")
    result = CliRunner().invoke(app, ["demo", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert message in re.sub(r"\s+", " ", result.output)


LOOPBACK, EMULATED = Network("unlimited"), Network("100mbit")
PREDICTED = Network("100mbit", "a testbed needs root")


def outcome(label: str, compute: float, step: float, mean_step: float) -> TrainingResult:
    return TrainingResult(
        label=label,
        settings={},
        ranks=4,
        steps=1,
        planned_steps=1,
        parameters=1000,
        validation_loss=2.0,
        bytes_sent_per_step=6000.0,
        bytes_sent_source="theoretical",
        seconds=StepSeconds(step, compute, step - compute, 0.0, mean_step),
        training_losses=[2.0],
        cumulative_seconds=[mean_step],
        cumulative_bytes=[6000.0],
        validation_losses=[(1, 2.0)],
        metrics=None,
        remark=None,
        overlaps=True,
        clock=None,
    )


def course(label: str, losses: list[float], seconds: float) -> TrainingResult:
    """A run with a validation after every step; the last step ends after so many seconds."""
    steps = len(losses)
    ends = [seconds * (k + 1) / steps for k in range(steps)]
    return replace(
        outcome(label, 0.1, 0.1, 0.1),
        steps=steps,
        validation_loss=losses[-1],
        training_losses=losses,
        cumulative_seconds=ends,
        cumulative_bytes=[1000.0 * (k + 1) for k in range(steps)],
        validation_losses=list(enumerate(losses, start=1)),
    )


def printed(comparison: Comparison) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_comparison(console, comparison)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("compute", "mean_step", "network", "comparable"),
    [
        pytest.param(0.096, 0.12, LOOPBACK, True, id="steady"),
        pytest.param(0.0793, 0.12, LOOPBACK, False, id="other speed"),
        pytest.param(0.0793, 0.12, EMULATED, True, id="other speed, but slow links"),
        pytest.param(0.07, 0.12, EMULATED, False, id="quite another speed"),
        pytest.param(0.096, 0.17, LOOPBACK, False, id="bursts"),
        pytest.param(0.096, 0.17, EMULATED, False, id="bursts on slow links"),
    ],
)
def test_a_busy_machine_gets_no_ratio(compute: float, mean_step: float, network: Network, comparable: bool) -> None:
    comparison = Comparison(
        outcome("before", compute, 0.1158, mean_step), outcome("after", 0.095, 0.0965, 0.1), network
    )
    text = printed(comparison)
    assert comparison.times_are_comparable is comparable
    assert ("1.2×" in text) is comparable
    assert ("No ratio of step times" in text) is not comparable
    assert ("try again when it is idle" in comparison.sentence()) is not comparable
    # Steps of stages differ by themselves.
    staged = replace(comparison.baseline, remark="one is dense.", seconds=StepSeconds(0.1, 0.095, 0.0, 0.0, 0.9))
    assert replace(comparison, baseline=staged).times_are_comparable


@pytest.mark.parametrize(
    ("losses", "seconds", "network", "reached", "sentence"),
    [
        pytest.param(
            [3.0, 2.5, 1.5, 1.0],
            20.0,
            EMULATED,
            12.5,
            "The same loss 1.6 × sooner: after was at 2.000 after 12.5 s, before after 20.0 s.",
            id="sooner",
        ),
        pytest.param(
            [2.0, 1.9],
            20.0,
            PREDICTED,
            10.0,
            "Predicted for 100 Mbit/s, not measured: the same loss 2.0 × sooner: after was at 2.000 after 10.0 s, "
            "before after 20.0 s.",
            id="from the first validation on, predicted",
        ),
        pytest.param(
            [3.0, 2.0],
            20.4,
            LOOPBACK,
            20.4,
            "The same loss at the same time: after was at 2.000 after 20.4 s, before after 20.0 s.",
            id="at the same time",
        ),
        pytest.param(
            [3.0, 2.0],
            40.0,
            LOOPBACK,
            40.0,
            "The same loss 2.0 × later: after was at 2.000 after 40.0 s, before after 20.0 s.",
            id="later",
        ),
        pytest.param(
            [3.0, 2.1],
            20.3,
            EMULATED,
            None,
            "No gain in this run: after ended at a loss of 2.100, before at 2.000, both after 20.0 s.",
            id="never",
        ),
        pytest.param(
            [3.0, math.nan],
            30.0,
            EMULATED,
            None,
            "No gain in this run: after ended at a loss of nan, before at 2.000, after 30.0 s and 20.0 s.",
            id="diverged",
        ),
        pytest.param(
            [math.nan, 1.5],
            20.0,
            EMULATED,
            20.0,
            "The same loss at the same time: after was at 2.000 after 20.0 s, before after 20.0 s.",
            id="nothing to interpolate from",
        ),
    ],
)
def test_the_sentence_says_what_is_true(
    losses: list[float], seconds: float, network: Network, reached: float | None, sentence: str
) -> None:
    comparison = Comparison(course("before", [4.0, 3.0, 2.0], 20.0), course("after", losses, seconds), network)
    assert comparison.seconds_to_baseline == (None if reached is None else pytest.approx(reached))
    assert comparison.sentence() == sentence
    assert sentence in printed(comparison)
    assert ("not reached" in printed(comparison)) is (reached is None)


def test_no_sentence_without_a_baseline() -> None:
    comparison = Comparison(course("before", [3.0, math.nan], 20.0), course("after", [3.0, 2.0], 20.0), EMULATED)
    assert comparison.sentence() == "Nothing to compare with: the loss of before is nan."
    assert comparison.seconds_to_baseline is None
    printed(comparison)


def test_bytes_until_the_same_loss() -> None:
    comparison = Comparison(course("before", [4.0, 3.0, 2.0], 20.0), course("after", [3.0, 1.0], 10.0), EMULATED)
    assert comparison.bytes_to_baseline == pytest.approx(1500.0)
    assert re.search(r"sent per worker by then +│ +3\.00 kB │ +1\.50 kB │ +2\.0×", printed(comparison))


@pytest.mark.parametrize(
    ("network", "axis", "title"),
    [
        (LOOPBACK, "training time over loopback (s)", "1,000 parameters, 4 workers over loopback"),
        (EMULATED, "training time at 100 Mbit/s (s)", "1,000 parameters, 4 hosts with links of 100 Mbit/s"),
        (
            PREDICTED,
            "PREDICTED training time at 100 Mbit/s (s)",
            "1,000 parameters, 4 workers, predicted for links of 100 Mbit/s",
        ),
    ],
)
def test_picture_and_table_say_where_the_times_come_from(network: Network, axis: str, title: str) -> None:
    comparison = Comparison(course("before", [4.0, 3.0, 2.0], 20.0), course("after", [3.0, 1.0], 10.0), network)
    figure = drawn(comparison)
    against_time, against_bytes = figure.axes
    assert against_time.get_xlabel() == axis
    assert [text.get_text() for text in against_time.texts if text.get_text()] == ["2.7 × sooner"]
    assert [text.get_text() for text in against_bytes.texts if text.get_text()] == ["2.0 × fewer bytes"]
    assert figure.get_supxlabel().endswith(title)
    assert figure.get_suptitle().replace("\n", " ") == comparison.sentence()
    text = printed(comparison)
    assert title in text
    assert ("training time, predicted" in text) is network.is_predicted
    assert ("Predicted, not measured" in text) is not network.is_emulated


def test_predictions_are_made_step_by_step() -> None:
    """A dense step that waits 0.3 s for the wire is not hidden by later ones that wait for nothing."""
    even = outcome("before", 0.1, 0.1, 0.1)
    # 3.75 MB are 0.3 s at 100 Mbit/s; a tenth of them hide behind forward and backward.
    uneven = replace(even, steps=4, cumulative_bytes=[3.75e6, 4.125e6, 4.5e6, 4.5e6], remark="one is dense.")
    comparison = Comparison(even, uneven, LOOPBACK)
    assert comparison.predicted_step_seconds(even, 1e8) == pytest.approx(0.1)
    assert comparison.predicted_step_seconds(uneven, 1e8) == pytest.approx((0.3 + 3 * 0.1) / 4)
    text = printed(comparison)
    assert "Steps of before" in text
    assert "one is dense. Bytes per step and predicted times are means over the whole run" in text


def test_who_sends_after_backward_is_not_predicted_to_hide_it() -> None:
    early = replace(outcome("before", 0.1, 0.1, 0.1), cumulative_bytes=[625e3])
    late = replace(early, label="after", overlaps=False)
    comparison = Comparison(early, late, LOOPBACK)
    assert comparison.predicted_step_seconds(early, 1e8) == pytest.approx(0.1)
    assert comparison.predicted_step_seconds(late, 1e8) == pytest.approx(0.1 + 0.05)
    for challenger, said in ((early, False), (late, True)):
        text = printed(Comparison(early, challenger, LOOPBACK))
        assert ("after sends nothing before all gradients are there" in " ".join(text.split())) is said


def test_a_budget_is_seconds_or_steps() -> None:
    for wrong in ({}, {"seconds": 1.0, "steps": 1}):
        with pytest.raises(ValueError, match="either seconds or steps"):
            Budget(**wrong)
    seconds, steps = Budget(seconds=10.0), Budget(steps=7)
    assert [seconds.planned_steps(each) for each in (0.4, 3.0, 100.0)] == [25, 3, 1]
    assert steps.planned_steps(0.4) == 7
    # The clock decides how far a run is: with steps of 0.5 s instead of 0.4 s, it has its last learning rate in time.
    assert [seconds.position(25, taken, 0.5 * taken) for taken in (0, 10, 20, 21)] == [0, 12.5, 25, 25]
    assert [steps.position(7, taken, 0.5 * taken) for taken in (0, 3, 7)] == [0, 3, 7]
    # The step that would end nearest to the end of the budget is the last one.
    assert next(taken for taken in range(1, 30) if seconds.is_spent(taken, 0.4 * taken)) == 25
    assert next(taken for taken in range(1, 30) if seconds.is_spent(taken, 0.6 * taken)) == 17
    assert seconds.is_spent(1, 30.0)
    assert [steps.is_spent(taken, 1e9) for taken in (6, 7)] == [False, True]


@pytest.mark.parametrize("planned", [1, 5, 25, 400])
@pytest.mark.parametrize("speed", [0.5, 1.0, 2.0])
def test_learning_rates_fit_the_time_that_a_run_really_has(planned: int, speed: float) -> None:
    """A machine that is slower or faster than in the trial changes the number of steps, and not the schedule."""
    budget = Budget(seconds=float(planned))
    elapsed, taken, factors = 0.0, 0, [learning_rate_factor(0.0, planned)]
    while taken == 0 or not budget.is_spent(taken, elapsed):
        elapsed, taken = elapsed + 1 / speed, taken + 1
        factors.append(learning_rate_factor(budget.position(planned, taken, elapsed), planned))
    used = factors[:taken]
    assert max(used) <= 1
    assert min(used) > 0
    if planned >= 25:
        assert max(used) > 0.98
        assert used[-1] < 0.05
        assert taken == pytest.approx(planned * speed, abs=1)


def test_lines_for_scripts() -> None:
    adam = contender("onebit-adam")
    lines = lines_for_scripts(adam, adam.whole_run(400, 0))
    assert lines[1].startswith("opt = thinwire.OneBitAdam(model.parameters(), lr=0.0025, weight_decay=0.1, betas=(")
    assert lines[2].startswith("thinwire.attach(model, opt)")
    assert lines_for_scripts(contender("compress-powersgd"), {})[2].startswith(
        'thinwire.compress(model, "powersgd", rank=4)'
    )
    for name, each in contenders("demo").items():
        lines = lines_for_scripts(each, each.whole_run(400, 0))
        assert len(lines) == 3
        assert "seed" not in lines[1]
        # They are Python as they stand.
        compile("\n".join(lines), name, "exec")


def test_adamw_has_the_rate_of_its_number_of_steps_with_and_without_compression() -> None:
    for steps, lr in ((111, 3e-3), (200, 3e-3), (201, 5e-3), (400, 5e-3)):
        for name in (None, "compress-int4"):
            plan = TrainingConfig("", ModelShape(1, 32, 16), 2, Budget(seconds=1.0), 0, name)
            assert plan.settings(steps) == {**ADAMW, "lr": lr}


def test_the_recommended_contender_exists() -> None:
    assert RECOMMENDED in contenders("demo")


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_a_bar_in_a_terminal_and_lines_elsewhere(terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=terminal, color_system=None)
    with LiveView(console, ["before", "after"], "s") as live:
        for label in ("before", "after"):
            live.begin(4)
            for step in range(1, 41):
                live.show(TrainingProgress(step, step / 40, 3.0, 0.5 * step, 1e6 * step))
            live.end(course(label, [4.0, 3.0, 2.0], 20.0))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("━" in shown) is terminal
    assert "before" in shown
    assert "2.00 MB/s sent" in shown
    if terminal:
        assert "starting 4 workers" in shown
    else:
        lines = shown.splitlines()
        assert len(lines) == 2 * 4
        assert lines[0] == "before: 5.0 s, step 10, loss 3.00, 2.00 MB/s sent"
        assert lines[-1] == "after: 20.0 s, 3 steps, validation loss 2.000, 3.00 kB sent"


def trained(rank: int, world_size: int, optimizer: str, steps: int) -> dict[str, Any]:
    plan = TrainingConfig("to be or not to be, " * 40, ModelShape(1, 32, 16), 2, Budget(steps=steps), 0, optimizer)
    return asdict(train(lambda _: None, plan))


# Of 0/1 Adam steps 10, 12 and 14, 16 to 18 and 20 are local; all but 16 and 18 are validated, and synchronised for it.
KINDS_OF_20_STEPS = {
    "onebit-adam": ["dense"] * 3 + ["bits"] * 17,
    "zero-one-adam": ["dense"] * 3 + ["bits"] * 12 + ["nothing", "bits", "nothing", "bits", "bits"],
    "onebit-lamb": ["dense"] * 3 + ["bits"] * 17,
    "lamb": ["dense"] * 20,
}


@pytest.mark.parametrize("optimizer", KINDS_OF_20_STEPS)
def test_what_steps_send(optimizer: str) -> None:
    run = run_ranks(trained, 2, optimizer, 20)[0]
    sent = [0, *run["cumulative_bytes"]]
    assert sent[-1] == run["metrics"]["bytes_sent"] == 20 * run["bytes_sent_per_step"]
    kinds: list[str] = []
    for before, after in pairwise(sent):
        # 2(n-1)/n floats; headers weigh a lot for so small a model.
        share = (after - before) / (4 * run["parameters"])
        assert share == 0 or 1 / 32 < share < 1 / 10 or 1 < share < 1.3
        kinds.append("nothing" if share == 0 else "bits" if share < 1 else "dense")
    assert kinds == KINDS_OF_20_STEPS[optimizer]
    assert run["remark"]
    assert run["validation_loss"] < run["training_losses"][0]
    assert run["metrics"]["skipped_steps"] == 0


BITS_OF_ALL_STEPS = {
    "cd-adam": 1,
    "cd-adam-momentum": 1,
    "cd-adam-topk": 1,
    "sketched-amsgrad": 32 * (5 / 50 + 2 / 100),
    "compress-int4": 4 + 16 / 64,
}


@pytest.mark.parametrize("optimizer", BITS_OF_ALL_STEPS)
def test_who_compresses_from_the_first_step_on(optimizer: str) -> None:
    run = run_ranks(trained, 2, optimizer, 20)[0]
    # Of two workers each sends half of its packets, and half of the answers; headers weigh a lot for so small a model.
    expected = BITS_OF_ALL_STEPS[optimizer] * run["parameters"] / 8
    for before, after in pairwise(run["cumulative_bytes"]):
        assert 1.0 < (after - before) / expected < 1.3
    assert run["remark"] is None
    assert run["overlaps"] is (optimizer != "sketched-amsgrad")
    assert run["validation_loss"] < run["training_losses"][0]
    assert run["metrics"]["skipped_steps"] == 0


@pytest.mark.parametrize("steps", [1, 2, 7, 50, 400, 4000])
@pytest.mark.parametrize("name", contenders("demo"))
def test_settings_suit_runs_of_any_length(name: str, steps: int) -> None:
    plan = TrainingConfig("", ModelShape(1, 32, 16), 2, Budget(steps=steps), 0, name)
    plan.prepare(nn.ParameterList([torch.ones(3)]), steps)
    settings = plan.settings(steps)
    if "warmup_steps" in settings and steps == 400:
        expected = (120, (0.7, 0.95)) if name == "onebit-adam-4bit" else (60, (0.8, 0.95))
        assert (settings["warmup_steps"], settings["betas"]) == expected
    if "local_step_scaler" in settings and steps >= 50:
        after = steps - settings["var_freeze_step"]
        assert local_interval(after, settings["local_step_scaler"], clipper=16) == 4


def test_corpus_keeps_the_last_tenth_for_validation() -> None:
    text = "".join(chr(ord("a") + k % 26) for k in range(1000))
    corpus = Corpus.from_text(text, context=9)
    assert corpus.vocabulary_size == 26
    assert (len(corpus.training), len(corpus.validation)) == (900, 100)
    characters, targets = corpus.training_batch(torch.tensor([0, 890]), context=9)
    assert characters.tolist() == [[k % 26 for k in range(first, first + 9)] for first in (0, 890)]
    assert targets.tolist() == [[k % 26 for k in range(first + 1, first + 10)] for first in (0, 890)]
    characters, _ = corpus.validation_windows(context=9, at_most=3)
    assert characters[:, 0].tolist() == [(900 + first) % 26 for first in (0, 27, 63)]


@pytest.mark.parametrize("context", [1, 9, 64, 100])
def test_the_shortest_text_fits(context: int) -> None:
    shortest = Corpus.shortest_text(context)
    corpus = Corpus.from_text("x" * shortest, context)
    assert corpus.validation_windows(context, at_most=512)[0].shape == (1, context)
    with pytest.raises(ValueError, match=f"has {shortest - 1} characters; a context of {context} needs at least"):
        Corpus.from_text("x" * (shortest - 1), context)


@pytest.mark.parametrize("steps", [1, 2, 7, 500])
def test_schedules_cover_the_run(steps: int) -> None:
    factors = [learning_rate_factor(step, steps) for step in range(steps)]
    assert max(factors) == 1.0
    assert min(factors) > 0
    due = [step for step in range(1, steps + 1) if is_due(step, steps, 12)]
    assert len(due) == min(steps, 12)
    assert due[-1] == steps

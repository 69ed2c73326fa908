"""`thinwire demo`: a short real run through the installed script, and what it says to bad input."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sysconfig
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
from thinwire.cli.app import app
from thinwire.cli.averagings import contenders
from thinwire.cli.charlm import Corpus, ModelShape
from thinwire.cli.report import Comparison, print_comparison
from thinwire.cli.schedule import is_due, learning_rate_factor
from thinwire.cli.training import StepSeconds, TrainingConfig, TrainingResult, train
from thinwire.optimizers.local_steps import local_interval

SCRIPT = Path(sysconfig.get_path("scripts"), "thinwire")
TINY = ("--layers", "1", "--width", "32", "--context", "16", "--batch", "2")


def run_script(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Wide, so that no message is broken into lines; no colours, whatever the machine that runs the tests asks for.
    environment = {key: value for key, value in os.environ.items() if key not in {"FORCE_COLOR", "GITHUB_ACTIONS"}}
    return subprocess.run(
        [SCRIPT, *arguments],
        cwd=folder,
        env=environment | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.timeout(180)
def test_short_run(tmp_path: Path) -> None:
    finished = run_script(
        tmp_path, "demo", "--ranks", "2", "--steps", "3", "--downlink", "votes", "--json", "results.json", *TINY
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    assert "\x1b" not in finished.stdout
    assert "validation loss" in finished.stdout
    assert "theoretical" in finished.stdout
    assert (tmp_path / "thinwire-demo.png").read_bytes().startswith(b"\x89PNG")

    results = json.loads((tmp_path / "results.json").read_text())
    baseline, challenger = results["baseline"], results["challenger"]
    for run in (baseline, challenger):
        assert run["ranks"] == 2
        assert run["steps"] == len(run["training_losses"]) == len(run["cumulative_seconds"]) == 3
        assert math.isfinite(run["validation_loss"])
        assert run["seconds"]["step"] > 0
        assert run["cumulative_bytes"] == sorted(run["cumulative_bytes"])
    # The same model and the same data: before the first update the two runs are one.
    assert baseline["training_losses"][0] == challenger["training_losses"][0]
    assert baseline["training_losses"][1] != challenger["training_losses"][1]

    assert baseline["bytes_sent_source"] == "theoretical"
    assert baseline["bytes_sent_per_step"] == pytest.approx(4 * baseline["parameters"])
    assert challenger["bytes_sent_source"] == "counted"
    assert challenger["settings"]["downlink"] == "votes"
    assert challenger["metrics"]["steps"] == 3
    assert challenger["metrics"]["bytes_sent"] == challenger["cumulative_bytes"][-1]
    assert challenger["bytes_sent_per_step"] < baseline["bytes_sent_per_step"]


@pytest.mark.timeout(180)
def test_a_text_of_ones_own_and_a_single_worker(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Grüße aus dem Süden. " * 40, encoding="utf-8")
    finished = run_script(
        tmp_path, "demo", "--data", str(text), "--ranks", "1", "--steps", "1", "--out", "own.png", *TINY
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    assert "840 characters" in finished.stdout
    assert (tmp_path / "own.png").stat().st_size > 0


@pytest.mark.timeout(60)
def test_bad_input_through_the_script(tmp_path: Path) -> None:
    finished = run_script(tmp_path, "demo", "--data", "missing.txt")
    assert finished.returncode == 2
    assert "missing.txt" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(60)
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


def outcome(label: str, compute: float, step: float, mean_step: float) -> TrainingResult:
    return TrainingResult(
        label=label,
        settings={},
        ranks=4,
        steps=1,
        parameters=1000,
        validation_loss=2.0,
        bytes_sent_per_step=6000.0,
        seconds=StepSeconds(step, compute, step - compute, 0.0),
        training_losses=[2.0],
        cumulative_seconds=[mean_step],
        cumulative_bytes=[6000.0],
        validation_losses=[(1, 2.0)],
        metrics=None,
        remark=None,
        overlaps=True,
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("compute", "mean_step", "comparable"),
    [
        pytest.param(0.096, 0.12, True, id="steady"),
        pytest.param(0.0793, 0.12, False, id="other speed"),
        pytest.param(0.096, 0.17, False, id="bursts"),
    ],
)
def test_a_busy_machine_gets_no_ratio(compute: float, mean_step: float, comparable: bool) -> None:
    comparison = Comparison(outcome("before", compute, 0.1158, mean_step), outcome("after", 0.095, 0.0965, 0.1))
    console = Console(file=io.StringIO(), width=100)
    print_comparison(console, comparison)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert comparison.times_are_comparable is comparable
    assert ("1.2×" in printed) is comparable
    assert ("No ratio of step times" in printed) is not comparable


@pytest.mark.timeout(60)
def test_predictions_are_made_step_by_step() -> None:
    """A dense step that waits 0.3 s for the wire is not hidden by later ones that wait for nothing."""
    even = outcome("before", 0.1, 0.1, 0.1)
    # 3.75 MB are 0.3 s at 100 Mbit/s; a tenth of them hide behind forward and backward.
    uneven = replace(even, steps=4, cumulative_bytes=[3.75e6, 4.125e6, 4.5e6, 4.5e6], remark="one is dense.")
    comparison = Comparison(even, uneven)
    assert comparison.predicted_step_seconds(even, 1e8) == pytest.approx(0.1)
    assert comparison.predicted_step_seconds(uneven, 1e8) == pytest.approx((0.3 + 3 * 0.1) / 4)
    console = Console(file=io.StringIO(), width=200)
    print_comparison(console, comparison)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Steps of before" in printed
    assert "one is dense. Bytes per step and predicted times are means over the whole run" in printed


@pytest.mark.timeout(60)
def test_who_sends_after_backward_is_not_predicted_to_hide_it() -> None:
    early = replace(outcome("before", 0.1, 0.1, 0.1), cumulative_bytes=[625e3])
    late = replace(early, label="after", overlaps=False)
    comparison = Comparison(early, late)
    assert comparison.predicted_step_seconds(early, 1e8) == pytest.approx(0.1)
    assert comparison.predicted_step_seconds(late, 1e8) == pytest.approx(0.1 + 0.05)
    for challenger, said in ((early, False), (late, True)):
        console = Console(file=io.StringIO(), width=200)
        print_comparison(console, Comparison(early, challenger))
        printed = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("after sends nothing before all gradients are there" in " ".join(printed.split())) is said


def trained(rank: int, world_size: int, optimizer: str, steps: int) -> dict[str, Any]:
    plan = TrainingConfig("to be or not to be, " * 40, ModelShape(1, 32, 16), 2, steps, 0, optimizer)
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
    plan = TrainingConfig("", ModelShape(1, 32, 16), 2, steps, 0, name)
    plan.prepare(nn.ParameterList([torch.ones(3)]))
    settings = plan.settings()
    if "warmup_steps" in settings and steps == 400:
        assert (settings["warmup_steps"], settings["betas"]) == (60, (0.8, 0.95))
    if "local_step_scaler" in settings and steps >= 50:
        after = steps - settings["var_freeze_step"]
        assert local_interval(after, settings["local_step_scaler"], clipper=16) == 4


@pytest.mark.timeout(60)
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


@pytest.mark.timeout(60)
@pytest.mark.parametrize("context", [1, 9, 64, 100])
def test_the_shortest_text_fits(context: int) -> None:
    shortest = Corpus.shortest_text(context)
    corpus = Corpus.from_text("x" * shortest, context)
    assert corpus.validation_windows(context, at_most=512)[0].shape == (1, context)
    with pytest.raises(ValueError, match=f"has {shortest - 1} characters; a context of {context} needs at least"):
        Corpus.from_text("x" * (shortest - 1), context)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("steps", [1, 2, 7, 500])
def test_schedules_cover_the_run(steps: int) -> None:
    factors = [learning_rate_factor(step, steps) for step in range(steps)]
    assert max(factors) == 1.0
    assert min(factors) > 0
    due = [step for step in range(1, steps + 1) if is_due(step, steps, 12)]
    assert len(due) == min(steps, 12)
    assert due[-1] == steps

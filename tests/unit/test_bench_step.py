"""`thinwire bench step`: what takes part, and short real runs on a testbed. Its report is in test_step_report.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

from tests.harness import run_ranks
from thinwire.cli.app import app
from thinwire.cli.stages import LOCAL_CYCLE
from thinwire.cli.step.methods import (
    CANNOT_RUN,
    METHODS,
    POWERSGD_BEGINS_AT,
    Cluster,
    bucket_size,
    method_named,
    obstacle,
    with_buckets,
)
from thinwire.cli.step.models import MODELS, parameter_count, parameter_shapes
from thinwire.cli.step.ranks import MeasurementError, Ranks
from thinwire.cli.step.results import StepPlan, StepResults
from thinwire.cli.step.run import SECONDS_TO_START, BenchProgress, BenchRun
from thinwire.cli.step.worker import WARM_UP_STEPS
from thinwire.testbed import Testbed, TestbedUnavailable

SCRIPT = Path(sysconfig.get_path("scripts"), "thinwire")
PATIENCE = 60.0


@contextmanager
def real_hosts(count: int) -> Iterator[Testbed]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(Testbed(count))
        except TestbedUnavailable as error:
            pytest.skip(str(error))
        yield made


# Who takes part -------------------------------------------------------------------------------------------------------


def test_models_have_the_sizes_that_their_names_claim() -> None:
    assert 7e6 < parameter_count("lm-7m") < 7.5e6
    assert 48e6 < parameter_count("lm-50m") < 52e6
    # He et al.'s, to the last parameter.
    assert parameter_count("resnet50") == 25_557_032
    assert parameter_count("lm-tiny") < 200_000


@pytest.mark.parametrize("name", ["lm-tiny", "resnet50"])
def test_models_train_on_the_same_random_data_every_time(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name].build()
    batches = [MODELS[name].batch(torch.Generator().manual_seed(1)) for _ in range(2)]
    for first, second in zip(*batches, strict=True):
        assert torch.equal(first, second)
    model(*batches[0]).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert [p.shape for p in model.parameters()] == list(parameter_shapes(name))


@pytest.mark.parametrize(
    ("method", "cluster", "bits_a_parameter"),
    [
        ("ddp-adamw", Cluster(4, 1), 2 * 3 / 4 * 32),
        ("ddp-adamw", Cluster(2, 2), 2 * 3 / 4 * 32),  # a ring leaves each host once, whatever its ranks
        ("ddp-bf16", Cluster(4, 1), 2 * 3 / 4 * 16),
        ("birder", Cluster(4, 1), 2 * 3 / 4),
        ("birder", Cluster(2, 2), 2 * 2 * 2 / 4),  # two ranks, each of which sends to the two of the other host
        ("birder@4MB", Cluster(4, 1), 2 * 3 / 4),
        ("birder-no-overlap", Cluster(4, 1), 2 * 3 / 4),
        ("birder-majority", Cluster(4, 1), 2 * 3 / 4),
        ("birder-votes", Cluster(4, 1), (1 + 3) * 3 / 4),  # 0 to 4 votes are 3 bits
        ("birder-votes", Cluster(3, 1), (1 + 2) * 2 / 3),
        ("birder-hierarchical", Cluster(2, 2), 2 * 1 / 2),
        ("birder-hierarchical", Cluster(4, 8), 2 * 3 / 4),
        ("onebit-adam", Cluster(4, 1), 2 * 3 / 4),
        ("onebit-adam", Cluster(2, 2), 2 * 2 * 2 / 4),
        ("onebit-adam-warmup", Cluster(4, 1), 2 * 3 / 4 * 32),  # as much as a ring of four
        ("onebit-adam-4bit-warmup", Cluster(4, 1), 2 * 3 / 4 * 4.25),
        ("zero-one-adam", Cluster(4, 1), 2 * 3 / 4),
        ("zero-one-adam-local", Cluster(4, 1), 2 * 3 / 4 / 16),
        ("onebit-lamb", Cluster(4, 1), 2 * 3 / 4),
        ("cd-adam", Cluster(4, 1), 65 / 64 * 2 * 3 / 4),  # and a bit for each word
        ("cd-adam-topk", Cluster(4, 1), 2 * 3 / 4),  # one element in 64, with an index of 32 bits and a float
        ("sketched-amsgrad", Cluster(4, 1), 2 * 3 / 4 * 32 * (5 / 50 + 2 / 100)),
        ("sketched-amsgrad", Cluster(2, 2), 2 * 2 * 2 / 4 * 32 * (5 / 50 + 2 / 100)),
        ("compress-int8", Cluster(4, 1), 2 * 3 / 4 * (8 + 16 / 64)),  # one bfloat16 scale for each block of 64
        ("compress-int4", Cluster(4, 1), 2 * 3 / 4 * (4 + 16 / 64)),
        ("compress-int4", Cluster(2, 2), 2 * 2 * 2 / 4 * (4 + 16 / 64)),
        ("compress-topk", Cluster(4, 1), 3 / 4 * 64 * (0.01 + 0.04)),  # four workers may pick different elements
        ("compress-powersgd", Cluster(4, 1), 2 * 3 / 4 * 32 * (4 * 1080 + 1) / 80_001),
        ("local", Cluster(4, 1), 0),
        ("ddp-adamw", Cluster(1, 4), 0),
        ("birder", Cluster(1, 4), 0),
    ],
)
def test_theoretical_bytes(method: str, cluster: Cluster, bits_a_parameter: float) -> None:
    shapes = [torch.Size([1000, 80]), torch.Size([])]
    assert method_named(method).theory(cluster, shapes) == pytest.approx(bits_a_parameter * 80_001 / 8)


def sent_by_powersgd(rank: int, world_size: int) -> dict[str, Any]:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 64), nn.Linear(64, 2, bias=False))
    model = DistributedDataParallel(net)
    optimizer = METHODS["powersgd"].prepare(model).optimizer
    state: Any = model._comm_hooks[0][1]
    for _ in range(POWERSGD_BEGINS_AT + 1):
        model(torch.randn(1, 3, 4, 4)).square().mean().backward()
        optimizer.step()
    return {"elements": state.total_numel_after_compression, "shapes": [tuple(p.shape) for p in net.parameters()]}


def test_theoretical_bytes_of_powersgd_are_those_of_the_hook() -> None:
    (sent,) = run_ranks(sent_by_powersgd, 1)
    shapes = [torch.Size(shape) for shape in sent["shapes"]]
    assert sent["elements"] < sum(shape.numel() for shape in shapes) / 2
    assert METHODS["powersgd"].theory(Cluster(2, 1), shapes) == 4 * sent["elements"]


def sent_a_step(rank: int, world_size: int, method: str) -> list[int]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(256, 256, bias=False))
    prepared = METHODS[method].prepare(model)
    assert prepared.metrics is not None
    sent = [0]
    for _ in range(WARM_UP_STEPS + 1 + 2 * max(LOCAL_CYCLE, METHODS[method].cycle)):
        model(torch.randn(1, 256)).square().mean().backward()
        prepared.optimizer.step()
        sent.append(prepared.metrics().bytes_sent)
    return [after - before for before, after in pairwise(sent)]


@pytest.mark.parametrize(
    ("method", "silent"),
    [
        ("onebit-adam", 0),
        ("onebit-adam-warmup", 0),
        ("zero-one-adam", 0),
        ("zero-one-adam-local", LOCAL_CYCLE - 1),
        ("onebit-lamb", 0),
        ("cd-adam", 0),
        ("cd-adam-topk", 0),
        ("sketched-amsgrad", 0),
        ("compress-int4", 0),
        ("compress-powersgd", 0),
        ("diloco-int4-h30", 29),
    ],
)
def test_measured_steps_are_of_the_kind_that_the_row_names(method: str, silent: int) -> None:
    measured = run_ranks(sent_a_step, 2, method)[0][WARM_UP_STEPS:]
    cycle, theory = METHODS[method].cycle, METHODS[method].theory(Cluster(2, 1), [torch.Size([256, 256])])
    # Wherever one begins to count, from the step by which the number of steps is chosen on.
    for first in range(len(measured) - cycle + 1):
        own = measured[first : first + cycle]
        assert own.count(0) == silent
        # Headers, and padding to whole words, of which a short sketch has most, and short factors even more.
        assert 1.0 < sum(own) / cycle / theory < (1.12 if method == "compress-powersgd" else 1.04)


def test_bucket_sizes_are_in_the_names() -> None:
    assert bucket_size(with_buckets(0.5)) == 0.5
    assert bucket_size("birder") is None
    with pytest.raises(KeyError):
        method_named("birder@manyMB and more")


def test_what_makes_no_sense_is_skipped_with_a_reason() -> None:
    assert obstacle("birder-hierarchical", Cluster(4, 1)) == "one rank per host: the same as flat"
    assert obstacle("birder-hierarchical", Cluster(2, 2)) is None
    for name in CANNOT_RUN:
        assert "deepspeed" in str(obstacle(name, Cluster(4, 1)))
    assert all(obstacle(name, Cluster(2, 2)) is None for name in METHODS)


# Bad arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "birder,sgd"], "--methods: unknown name 'sgd'; there are ddp-adamw, ddp-bf16,"),
        (["--models", "gpt-5"], "--models: unknown name 'gpt-5'; there are lm-7m, lm-50m, resnet50, lm-tiny, and all"),
        (["--rates", "100mbit,fast"], "--rates: rate must be like '100mbit' or '1gbit'"),
        (["--rates", "100mbit,fast"], "got 'fast'"),
        (["--buckets", "1,zero"], "--buckets: must be numbers of MB, like 1,2,4; got 'zero'"),
        (["--buckets", "-1"], "--buckets: must be numbers of MB, like 1,2,4; got '-1'"),
        (["--hosts", "1"], "'--hosts': must be at least 2, got 1"),
        (["--hosts", "1000"], "--hosts: hosts must be 1 to 254, got 1000"),
        (["--ranks", "0"], "'--ranks': must be at least 1, got 0"),
        (["--rounds", "0"], "'--rounds': must be at least 1, got 0"),
        (["--html", "nowhere/page.html"], "cannot write 'nowhere/page.html'"),
        (["--from-json", "missing.json"], "'missing.json' does not exist"),
    ],
)
def test_bad_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["bench", "step", *arguments], env={"COLUMNS": "300", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert message in re.sub(r"\s+", " ", result.output)


def run_script(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in {"FORCE_COLOR", "GITHUB_ACTIONS"}}
    return subprocess.run(
        [SCRIPT, "bench", "step", *arguments],
        cwd=folder,
        env=kept | {"COLUMNS": "200"} | environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def test_without_a_testbed_it_says_what_is_missing(tmp_path: Path) -> None:
    finished = run_script(tmp_path, "--json", "results.json", PATH=str(tmp_path))
    assert finished.returncode == 2
    assert finished.stderr.startswith("thinwire bench step: ")
    assert "Traceback" not in finished.stderr
    assert list(tmp_path.iterdir()) == []


# Real runs ------------------------------------------------------------------------------------------------------------


def test_end_to_end(tmp_path: Path) -> None:
    with real_hosts(1):  # or skip
        pass
    finished = run_script(
        tmp_path,
        *("--hosts", "2", "--models", "lm-tiny", "--methods", "ddp-adamw,local,birder,birder-hierarchical"),
        *("--rates", "20mbit,unlimited", "--rounds", "1", "--seconds", "0.2", "--buckets", "0.1"),
        *("--json", "results.json", "--html", "report.html", "--png", "report.png"),
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    assert "20 Mbit/s" in finished.stdout
    assert "birder-hierarchical skipped on lm-tiny: one rank per host" in finished.stdout
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")

    text = (tmp_path / "results.json").read_text(encoding="utf-8")
    results = StepResults.from_json(text)
    assert results.command.startswith("thinwire bench step --hosts 2 --models lm-tiny")
    assert results.machine["torch"] == torch.__version__
    rows = {(row.rate, row.method): row for row in results.rows()}
    methods = ("ddp-adamw", "local", "birder", "birder@0.1MB")
    assert set(rows) == {(rate, method) for rate in ("20mbit", "unlimited") for method in methods}
    for row in rows.values():
        assert row.turns == 1
        assert row.steps >= 2
        assert 0 < row.step.low <= row.step.median <= row.step.high
        assert row.compute > 0
        assert row.exposed_wait >= 0
    for rate in ("20mbit", "unlimited"):
        dense, ours = rows[rate, "ddp-adamw"], rows[rate, "birder"]
        # With headers, and with what TCP sends twice because a busy machine acknowledges late.
        assert 1.0 < dense.bytes_sent / dense.bytes_theory < 1.25
        # Headers weigh more than they do in a model of millions.
        assert 1.0 < ours.bytes_sent / ours.bytes_theory < 1.5
        assert rows[rate, "local"].bytes_sent < 2000
    # 0.45 MB at 20 Mbit/s take 0.18 s on any machine.
    dense, ours = rows["20mbit", "ddp-adamw"], rows["20mbit", "birder"]
    assert dense.step.median > 0.15
    assert dense.step.median >= 0.95 * 8 * dense.bytes_theory / 20e6
    assert dense.to_bound == pytest.approx(dense.step.median / dense.bound)
    assert ours.speed_up == pytest.approx(dense.step.median / ours.step.median)
    # The fastest of each, because a busy machine may make any single step slow.
    fastest = {turn.method: min(turn.step) for turn in results.turns if turn.rate == "20mbit"}
    assert fastest["birder"] < fastest["ddp-adamw"]


@pytest.mark.usefixtures("forked_ranks")
def test_optimizers_send_what_their_rows_say() -> None:
    """Those that begin dense are measured in their stages."""
    methods = (
        *(
            "onebit-adam",
            "onebit-adam-warmup",
            "onebit-adam-4bit",
            "onebit-adam-4bit-warmup",
            "zero-one-adam",
            "zero-one-adam-local",
            "onebit-lamb",
        ),
        *("cd-adam", "cd-adam-topk", "sketched-amsgrad", "compress-int4", "compress-powersgd"),
    )
    plan = StepPlan(2, 1, ("unlimited",), ("lm-tiny",), methods, rounds=1, seconds=0.1)
    with real_hosts(2) as made:
        conductor = BenchRun(made, plan, lambda _: None)
        conductor.run()
    assert conductor.unmeasured == []
    turns = {turn.method: turn for turn in conductor.turns}
    counted = {method: turn.thinwire["bytes_sent"] for method, turn in turns.items()}
    assert len(turns["zero-one-adam-local"].step) % LOCAL_CYCLE == 0
    assert counted["zero-one-adam-local"] == pytest.approx(counted["zero-one-adam"] / LOCAL_CYCLE)
    for row in StepResults("", {}, plan, conductor.turns, conductor.unmeasured).rows():
        assert 1.0 < counted[row.method] / row.bytes_theory < 1.2
        assert row.bytes_sent > counted[row.method]


@pytest.mark.usefixtures("forked_ranks")
def test_a_method_that_fails_is_named_and_the_others_go_on() -> None:
    """A rank dies in the first turn of ddp-adamw, as one does that the kernel kills for its memory."""
    plan = StepPlan(2, 1, ("unlimited",), ("lm-tiny",), ("local", "ddp-adamw", "birder"), rounds=2, seconds=0.1)
    taken: list[str] = []

    def watch(progress: BenchProgress) -> None:
        if taken[-1:] != [progress.method]:
            taken.append(progress.method)
            if progress.method == "ddp-adamw":
                os.kill(conductor.pids[1], signal.SIGKILL)

    with real_hosts(2) as made:
        conductor = BenchRun(made, plan, watch)
        conductor.run()
    (failure,) = conductor.unmeasured
    assert (failure.model, failure.method, failure.outcome) == ("lm-tiny", "ddp-adamw", "failed")
    assert failure.reason.startswith("rank 1 was ended by SIGKILL")
    # The second round begins with the second method, which is out.
    assert taken == ["local", "ddp-adamw", "birder", "local"]
    assert [turn.method for turn in conductor.turns] == ["local", "birder", "birder", "local"]
    results = StepResults("", {}, plan, conductor.turns, conductor.unmeasured)
    assert [row.method for row in results.rows()] == ["local", "birder"]
    assert all(row.speed_up is None for row in results.rows())


@pytest.mark.usefixtures("forked_ranks")
def test_an_exception_and_silence_end_a_turn() -> None:
    with real_hosts(1) as made:
        with Ranks(made, 1, lambda: None) as ranks:
            ranks.answers(SECONDS_TO_START, "start")
            with pytest.raises(MeasurementError, match=r"^rank 0: KeyError: 'no such method'$"):
                ranks.command(PATIENCE, "prepare", model="lm-tiny", method="no such method")
            assert "Traceback" in ranks.output()

        with Ranks(made, 1, lambda: None) as ranks:
            ranks.answers(SECONDS_TO_START, "start")
            os.kill(ranks.pids[0], signal.SIGSTOP)
            with pytest.raises(MeasurementError, match="no rank made progress for 1 s during 'prepare'"):
                ranks.command(1.0, "prepare", model="lm-tiny", method="local")
        for pid in ranks.pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

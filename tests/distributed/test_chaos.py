"""`thinwire chaos`: a short run on real ranks finds nothing, and one on ranks that misbehave finds what they do."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.distributed.chaos_actors import act
from tests.testbeds import namespaces_of, skip_unless_available
from thinwire.cli.app import app
from thinwire.cli.chaos import faults, injection, run
from thinwire.cli.chaos.episodes import Net, episodes
from thinwire.cli.chaos.ranks import Rank
from thinwire.cli.chaos.results import CRASH, DIVERGENCE, FALSE_ALARM, HANG, LOST, WRONG_ERROR, ChaosResults
from thinwire.cli.chaos.subjects import subjects
from thinwire.cli.registry import offered
from thinwire.testbed import Testbed, TestbedUnavailable
from thinwire.testbed.forkserver import ForkServer

SCRIPT = Path(sysconfig.get_path("scripts"), "thinwire")
STEPS = 600
"""Of an episode of actors: 12 s where a fault is to come, so that it does not come too late on a busy machine."""
TIMEOUT = 8
"""Of real ranks, in seconds. One that is frozen for 0.4 of it, or has to wait for a core, must be borne."""
GRACE_SECONDS = 8.0
"""What actors may take to end, with some more for this process, which may have to wait for a core as well."""


@pytest.fixture
def available() -> None:
    skip_unless_available()


@pytest.mark.usefixtures("available")
@pytest.mark.timeout(600)
def test_every_kind_of_fault_on_real_ranks(tmp_path: Path) -> None:
    written = tmp_path / "chaos.json"
    limits = ["--minutes", "8", "--faults", str(len(faults.FAULTS) + 1), "--timeout", str(TIMEOUT)]
    process = subprocess.run(
        [sys.executable, SCRIPT, "chaos", *limits, "--seed", "1", "--json", written],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    report = json.loads(written.read_text())
    assert report["wrongs"] == []
    assert len(report["faults_by_kind"]) >= len(faults.FAULTS) - 1
    assert report["restarts"] >= 4
    # Whoever takes too long, the time without a core aside, is among the wrongs. Some had waited before the fault came.
    silent = [f["noticed_after"] for f in report["faults"] if f["kind"] in ("cut", "freeze for good")]
    assert all(seconds > TIMEOUT / 2 for seconds in silent)
    assert [ending["contender"] for ending in report["endings"]][:2] == ["birder", "compress-int4"]
    assert all(ending["skipped"] > 0 for ending in report["endings"])
    assert list(tmp_path.glob("thinwire*")) == []


# Ranks that misbehave -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def actors() -> Iterator[ForkServer]:
    skip_unless_available()
    with ForkServer(["tests.distributed.chaos_actors"]) as server:
        server.wait()
        yield server


def staged(part: str, fault: str, actors: ForkServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ChaosResults:
    """An episode with faults of one kind, played by actors."""

    def inflict_when_saved(injected: injection.Injection) -> None:
        # Otherwise there would be nothing to forget, or to load in a wrong way.
        while not injected.attempt.failed and any(rank.saved == 0 for rank in injected.ranks):
            injected.attempt.receive(0.2)
        faults.FAULTS[fault](injected)

    monkeypatch.setattr(injection, "GRACE_SECONDS", GRACE_SECONDS)
    monkeypatch.setattr(run, "FAULTS", {fault: inflict_when_saved})
    # No longer than until an actor complains. It may have to wait for a core before.
    monkeypatch.setattr(faults, "_BEARABLE", (5.0, 5.0))
    monkeypatch.setattr(run, "episodes", lambda *_: [replace(next(episodes(0, 2)), steps=STEPS)])
    (folder / "part").write_text(part)
    report = ChaosResults(seed=0, hosts=2, timeout=1.0)
    limits = run.Limits(math.inf, 1)
    with Testbed(2) as testbed:
        run.ChaosRun(testbed, actors, folder, report, limits, print, train=act).run()
    assert [path.name for path in folder.iterdir()] == ["part"]
    return report


def test_sound_actors(actors: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = staged("sound", "kill", actors, tmp_path, monkeypatch)
    assert report.wrongs == []
    assert [(fault.kind, fault.restarted) for fault in report.faults] == [("kill", True)]
    (ending,) = report.endings
    assert (ending.faults, ending.restarts, ending.skipped, ending.digest) == (1, 1, 3, "end")


@pytest.mark.parametrize(
    ("part", "fault", "what", "words"),
    [
        ("hangs", "kill", HANG, "in fail"),
        ("lingers", "kill", HANG, "raised nothing"),
        ("raises another error", "kill", WRONG_ERROR, "raised ValueError, expected PeerLost"),
        ("aborts", "kill", CRASH, "ended by SIGABRT after PeerLost"),
        ("nervous", "freeze briefly", FALSE_ALARM, "there were none"),
        ("diverges", "kill", DIVERGENCE, "other parameters than without faults when it had loaded"),
        ("miscounts", "kill", DIVERGENCE, "skipped=7), and RankResult(digest='end', skipped=3) without faults"),
        ("forgets", "kill", LOST, "but went on from step 0"),
    ],
)
def test_what_must_not_happen_is_noticed(
    part: str, fault: str, what: str, words: str, actors: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = staged(part, fault, actors, tmp_path, monkeypatch)
    # On a machine that is busy with something else actors may lose each other as well.
    told = [wrong.details for wrong in report.wrongs if wrong.what == what]
    assert told
    assert all(words in details for details in told)
    assert json.loads(report.to_json())["wrongs_by_kind"][what] == len(told)


def test_a_second_call_continues_with_the_next_episode(
    actors: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = [replace(episode, steps=STEPS) for episode in itertools.islice(episodes(0, 2), 3)]
    monkeypatch.setattr(run, "FAULTS", {"kill": faults.FAULTS["kill"]})
    monkeypatch.setattr(run, "episodes", lambda *_: iter(drawn))
    monkeypatch.setattr(run, "_MOST_FAULTS", 1)
    (tmp_path / "part").write_text("sound")
    written = tmp_path / "chaos.json"
    ChaosResults(seed=0, hosts=2, timeout=1.0).write(written)
    for wanted in (1, 3, 3):
        report = ChaosResults.from_json(written.read_text())
        limits = run.Limits(math.inf, wanted)
        with Testbed(2) as testbed:
            store = functools.partial(report.write, written)
            run.ChaosRun(testbed, actors, tmp_path, report, limits, print, train=act, on_episode=store).run()
        found = ChaosResults.from_json(written.read_text())
        assert found == report
        assert found.wrongs == []
        assert [ending.episode for ending in found.endings] == list(range(wanted))
        assert [fault.episode for fault in found.faults] == list(range(wanted))


# The rest -------------------------------------------------------------------------------------------------------------


def test_saving_makes_some_ranks_equal() -> None:
    """0/1 Adam's. If the next step fails, they have what they saved, not what they had before."""
    nobody: Any = None
    rank = Rank(nobody, nobody)
    rank.take("step", {"step": 8, "digest": "own"})
    assert rank.last_digest == "own"
    rank.take("saved", {"step": 8, "digest": "common"})
    assert rank.last_digest == "common"
    rank.take("step", {"step": 9, "digest": "own again"})
    assert rank.last_digest == "own again"


def test_episodes_depend_on_the_seed_only() -> None:
    names = set(subjects())
    assert set(offered("chaos")) < names
    for hosts in (2, 4):
        first, again = (episodes(5, hosts) for _ in range(2))
        drawn = [next(first) for _ in range(3 * len(names))]
        assert drawn == [next(again) for _ in drawn]
        assert {episode.subject_name for episode in drawn} == names
        in_nodes = {episode.subject_name for episode in drawn if episode.ranks_a_node == 2}
        able = {name for name, subject in subjects().items() if subject.runs_in_nodes}
        assert in_nodes == (able if hosts == 4 else set())
    assert next(episodes(5, 4)) != next(episodes(6, 4))


@pytest.mark.parametrize(("name", "expected"), [("local-cser", [4, 8]), ("local-int4", []), ("local-streaming", [])])
def test_steps_with_two_exchanges(name: str, expected: list[int]) -> None:
    """If the second one fails, the first one has changed what all ranks agree on."""
    trained = subjects()[name].prepare(torch.nn.Linear(3, 2), bucket_mb=1.0)
    assert [step for step in range(1, 9) if trained.exchanges_twice(step)] == expected


def test_some_gradients_are_not_finite() -> None:
    episode = next(episodes(0, 4))
    poisoned = [(rank, step) for step in range(1000) for rank in range(4) if episode.poison(rank, step) is not None]
    assert 20 < len({step for _, step in poisoned}) < 120
    assert {rank for rank, _ in poisoned} == {0, 1, 2, 3}
    names = {name for name, _ in Net().named_parameters()}
    assert set(Net.ALWAYS_USED) < names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "1"], "must be at least 2, got 1"),
        (["--hosts", "255"], "hosts must be 1 to 254, got 255"),
        (["--faults", "0"], "'--faults'"),
        (["--json", "/no/such/folder/x.json"], "there is no writable folder"),
        (["--json", "{other}", "--seed", "1"], "has results with --seed 7, not 1: give the same, or another file"),
        (["--json", "{none}"], "it has no results of thinwire chaos that could go on"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "other").write_text(ChaosResults(seed=7, hosts=4, timeout=5.0).to_json())
    (tmp_path / "none").write_text('{"seed": 7}')
    arguments = [word.format(other=tmp_path / "other", none=tmp_path / "none") for word in arguments]
    result = CliRunner().invoke(app, ["chaos", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_where_there_can_be_no_testbed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Testbed) -> Testbed:
        raise TestbedUnavailable("a testbed needs root")

    monkeypatch.setattr(Testbed, "__enter__", refuse)
    result = CliRunner().invoke(app, ["chaos"])
    assert result.exit_code == 2
    assert result.stderr == "thinwire chaos: a testbed needs root\n"
    assert namespaces_of(os.getpid()) == []

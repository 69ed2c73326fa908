"""Law 8: a rank that is killed, frozen or interrupted, at any stage, hangs nobody. Ranks are real programs."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.fault_cases import (
    STAGES,
    Blow,
    Interrupt,
    InterruptThenDie,
    Notes,
    Report,
    Stage,
    fail,
    kill,
    stop,
    suffer,
)
from tests.forked import Ended, Run, run_to_the_end

pytestmark = pytest.mark.timeout(600)  # the first test waits for all faults

LONG, SHORT = 240.0, 15.0
"""Timeouts of process groups. No rank can reach the long one before the test ends. The short one leaves a busy machine
time for the exchanges before the fault: ranks of a run may get their first cores seconds apart."""
MARGIN = 30.0
"""Seconds after a timeout, or after connections have closed, within which every rank must raise. A busy machine needs
some of them; without the closed connections it would be the long timeout."""
EXIT_SECONDS = 40.0
"""Within which a process must end that waits for nothing; most of it is Python's and torch's own time."""
EXCHANGING = {
    "packets",
    "answers",
    "packets to be taken",
    "answers to be taken",
    "a connection",
    "a connection to send packets",
    "a connection to send answers",
    "a connection inside the node",
    "gradients of the node",
    "answers of the node",
    "gradients and answers to be taken in the node",
    "the commit round",
}
OF_NO_BUCKET = {
    "a connection",
    "a connection inside the node",
    "gradients and answers to be taken in the node",
    "the commit round",
}
OF_ALL_RANKS = {"the agreement of all ranks", "connections between ranks", "the checksums of replicas"}


@dataclass(frozen=True)
class Fault:
    """What strikes whom, when, and how that is seen by others."""

    stage: Stage
    blow: Blow
    timeout: float
    manners: str = ""
    victim_stops: bool = False
    in_haste: bool = False

    def run(self, directory: Path) -> Run:
        """To be run in a directory of its own."""
        return Run(
            suffer,
            self.stage.world_size,
            (self.stage, self.blow, str(directory), self.manners),
            timeout=self.timeout,
            stops=self.stage.victim if self.victim_stops else None,
            deadline=180.0,
            in_haste=self.in_haste,
        )

    def bound(self) -> float:
        """Within how many seconds everybody must notice."""
        return MARGIN + (self.timeout if self.timeout == SHORT else 0.0)


EXITS = {"the agreement", "connections", "packets during backward", "apply", "the replica check"}
"""Stages after which the interpreters of the survivors are seen to exit."""


def _kill(name: str) -> Fault:
    # Connections that are not there yet cannot close: only the timeout tells.
    timeout = SHORT if name.startswith("connections") else LONG
    return Fault(STAGES[name], kill, timeout, in_haste=name not in EXITS)


def _stop(name: str) -> Fault:
    return Fault(STAGES[name], stop, SHORT, victim_stops=True, in_haste=name not in EXITS)


PAIR = Stage(STAGES["merging"].owner, "_merge_presence", call=2, world_size=2)
PAIR_AGREES = Stage(STAGES["the agreement"].owner, "gather", step=0, world_size=2)
PAIR_CHECKS = Stage(
    STAGES["the replica check"].owner, "gather_integer", world_size=2, options={"check_replicas_every": 3}
)
KILLS = {f"kill: {name}": _kill(name) for name in STAGES}
STOPS = {f"stop: {name}": _stop(name) for name in STAGES}
FAILURES = {
    f"fail: {name}": Fault(STAGES[name], fail, LONG) for name in ("merging", "dense merging", "merging between nodes")
}
INTERRUPTIONS = {
    "SIGINT in an exchange": Fault(PAIR, Interrupt(signal.SIGINT), LONG, victim_stops=True),
    "SIGINT in the agreement": Fault(PAIR_AGREES, Interrupt(signal.SIGINT), LONG, victim_stops=True),
    "SIGINT in the replica check": Fault(PAIR_CHECKS, Interrupt(signal.SIGINT), LONG, victim_stops=True),
    "SIGINT that is caught": Fault(PAIR, Interrupt(signal.SIGINT), LONG, "catches", victim_stops=True),
    "SIGTERM": Fault(PAIR, Interrupt(signal.SIGTERM), LONG, victim_stops=True),
    "SIGTERM with a handler": Fault(PAIR, Interrupt(signal.SIGTERM), LONG, "exits", victim_stops=True),
}
STATUS = {"SIGTERM": -signal.SIGTERM, "SIGTERM with a handler": 143, "SIGINT that is caught": 0}
TEARDOWNS = {
    f"{where}, and connections close {delay} s later": Fault(
        STAGES["merging"], InterruptThenDie(delay, manners == "dawdles"), LONG, manners
    )
    for where, manners in (("in step()", ""), ("before step()", "dawdles"))
    for delay in (0.05, 0.15, 0.3)
}
FAULTS = {**STOPS, **INTERRUPTIONS, **TEARDOWNS, **KILLS, **FAILURES}
"""Those first that wait longest."""


@dataclass(frozen=True)
class Aftermath:
    """What became of the ranks of a fault."""

    struck: float
    ranks: list[Ended]

    def report(self, rank: int) -> Report:
        """Of a rank that has ended as it should."""
        ended = self.ranks[rank]
        assert ended.status == 0, f"rank {rank} ended with {ended.status}:\n{ended.log}"
        assert isinstance(ended.report, Report)
        return ended.report


@pytest.fixture(scope="module")
def aftermaths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Aftermath]:
    """Of all faults: they mostly wait, so they are run side by side."""
    directories = {name: tmp_path_factory.mktemp("fault") for name in FAULTS}
    everything = run_to_the_end([fault.run(directories[name]) for name, fault in FAULTS.items()])
    aftermaths = {}
    for name, ranks in zip(FAULTS, everything, strict=True):
        struck = Notes(str(directories[name])).read("struck")
        logs = "\n".join(f"rank {rank}: {ended.status}\n{ended.log}" for rank, ended in enumerate(ranks))
        assert struck is not None, f"{name}: never struck\n{logs}"
        aftermaths[name] = Aftermath(struck, ranks)
    return aftermaths


def assert_lost(report: Report, stage: Stage) -> None:
    """A PeerLost that says what it can, and leaves nothing behind."""
    assert report.raised == "PeerLost", report.traceback
    assert report.stage in EXCHANGING | OF_ALL_RANKS
    assert (report.stage in OF_ALL_RANKS) == stage.method.startswith(("gather", "connect"))
    assert f"waiting for {report.stage}" in report.message
    assert report.step is None or f"step {report.step}" in report.message
    assert report.bucket is None or f"bucket {report.bucket}" in report.message
    assert_nothing_left(report, stage)


def assert_nothing_left(report: Report, stage: Stage) -> None:
    # A thread that makes connections, or asks a store that is frozen, is inside torch and cannot be called back.
    assert report.threads == 0 or stage.method == "connect"
    assert report.farewell < MARGIN


@pytest.mark.parametrize("name", [*KILLS, *STOPS])
def test_survivors_notice_in_time(aftermaths: dict[str, Aftermath], name: str) -> None:
    fault, aftermath = FAULTS[name], aftermaths[name]
    stage = fault.stage
    survivors = {rank: aftermath.report(rank) for rank in range(stage.world_size) if rank != stage.victim}
    for rank, report in survivors.items():
        assert_lost(report, stage)
        assert report.where == ("attach" if stage.step == 0 and stage.attach else "step")
        assert report.step in stage.noticed
        assert 0.0 < report.at - aftermath.struck < fault.bound(), f"rank {rank}: {report.message}"
        assert aftermath.ranks[rank].at - report.at < EXIT_SECONDS + MARGIN
        assert (report.bucket is None) == (report.stage in OF_ALL_RANKS | OF_NO_BUCKET)
    if not stage.method.startswith(("gather", "connect")):
        assert any(stage.victim in report.ranks for report in survivors.values())
    assert aftermath.ranks[stage.victim].status == (-signal.SIGKILL if fault.blow is kill else 0)


@pytest.mark.parametrize("name", STOPS)
def test_a_rank_that_is_continued_finds_itself_alone(aftermaths: dict[str, Aftermath], name: str) -> None:
    stage, aftermath = FAULTS[name].stage, aftermaths[name]
    report = aftermath.report(stage.victim)
    assert report.raised == "PeerLost", report.traceback
    assert_nothing_left(report, stage)
    last = max(ended.at for rank, ended in enumerate(aftermath.ranks) if rank != stage.victim)
    assert aftermath.ranks[stage.victim].at - last < SHORT + MARGIN + EXIT_SECONDS


@pytest.mark.parametrize("name", FAILURES)
def test_an_exception_in_a_lane_surfaces_in_step(aftermaths: dict[str, Aftermath], name: str) -> None:
    fault, aftermath = FAULTS[name], aftermaths[name]
    for rank in range(fault.stage.world_size):
        report = aftermath.report(rank)
        assert report.where == "step"
        assert 0.0 < report.at - aftermath.struck < MARGIN
        assert report.threads == 0
        if rank == fault.stage.victim:
            assert report.raised == "RuntimeError"
            assert "no merging today" in report.message
            for frame in ("in _answer", "in fail", "ValueError: no merging today"):
                assert frame in report.traceback
        else:
            assert_lost(report, fault.stage)


@pytest.mark.parametrize("name", INTERRUPTIONS)
def test_an_interrupted_rank_ends_at_once(aftermaths: dict[str, Aftermath], name: str) -> None:
    """By itself, with threads inside gloo that wait for a rank that is frozen."""
    fault, aftermath = FAULTS[name], aftermaths[name]
    interrupted = aftermath.ranks[0]
    assert interrupted.status == STATUS.get(name, -signal.SIGINT), interrupted.log
    assert interrupted.at - aftermath.struck < EXIT_SECONDS
    if fault.manners == "catches":
        report = aftermath.report(0)
        assert report.raised == "KeyboardInterrupt"
        assert report.at - aftermath.struck < MARGIN
        assert report.threads == 0
        assert report.farewell < MARGIN
    elif "SIGINT" in name:
        assert "KeyboardInterrupt" in interrupted.log
    assert aftermath.report(fault.stage.victim).raised == "PeerLost"


@pytest.mark.parametrize("name", TEARDOWNS)
def test_connections_that_close_during_the_teardown_crash_nobody(aftermaths: dict[str, Aftermath], name: str) -> None:
    """As when Ctrl-C gets to all ranks: a thread that came back to Python then was ended by std::terminate."""
    for rank in (0, 2):
        ended = aftermaths[name].ranks[rank]
        assert ended.status == -signal.SIGINT, ended.log
        assert name.startswith("before") == ("in dawdle" in ended.log)
        assert ended.at - aftermaths[name].struck < EXIT_SECONDS

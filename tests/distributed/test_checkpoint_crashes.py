"""Writers that are killed at any moment: what was saved before is whole, and what they leave behind goes."""

from __future__ import annotations

import gc
import itertools
import os
import random
import shutil
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.distributed.checkpoint_runs import listed
from tests.distributed.common import digest
from tests.harness import forked, run_ranks, run_ranks_expecting_errors, wait_for_end
from thinwire import checkpoint

EPISODES = 4
"""How often one of two ranks is killed."""
SECONDS = 60

pytestmark = pytest.mark.timeout(300)  # more than a hundred processes, on a machine that may be busy


class Run:
    """Training whose state is a function of the step, so that everybody can tell what was saved."""

    def __init__(self, rank: int = 0) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.net = nn.Linear(40, 3)
        self.optimizer = thinwire.Birder(self.net.parameters(), lr=0.01)
        self.step = 0

    def train(self) -> None:
        generator = torch.Generator().manual_seed(100 * self.step + self.rank)
        self.net(torch.randn(4, 40, generator=generator)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def now(self) -> str:
        state = [value for p in self.net.parameters() for value in self.optimizer.state[p].values()]
        return digest([*self.net.parameters(), *state])

    def save(self, path: Path) -> None:
        checkpoint.save(path, self.net, self.optimizer, self.step, keep=2)

    def load(self, path: Path) -> None:
        found = checkpoint.load(path, self.net, self.optimizer)
        if found is not None:
            self.step = found.step


class Straight:
    """What an undisturbed run has at every step, computed as far as it is asked for."""

    def __init__(self) -> None:
        self._run = Run()
        self._states = [self._run.now()]

    def __getitem__(self, step: int) -> str:
        while len(self._states) <= step:
            self._run.train()
            self._states.append(self._run.now())
        return self._states[step]


# One writer ----------------------------------------------------------------------------------------------------------


def save_for_ever(connection: Connection, path: Path) -> None:
    torch.set_num_threads(1)
    run = Run()
    run.load(path)
    for step in itertools.count():
        began = time.monotonic()
        if step:
            run.train()
            run.save(path)
        connection.send((run.step, time.monotonic() - began))  # there is a checkpoint of this step by now


def last_said(connection: Connection) -> Any:
    """What a process has said last by its end; None if nothing."""
    said = None
    try:
        while True:
            said = connection.recv()
    except EOFError:
        return said


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_a_writer_that_is_killed_leaves_the_checkpoint_before_it_whole(kills: int, tmp_path: Path) -> None:
    moments, straight, in_the_middle, killed = random.Random(0), Straight(), 0, 0
    Run().save(tmp_path)
    # More than that if the machine lets too few of them come in the middle of a save.
    while killed < kills or in_the_middle <= kills // 10:
        with forked(save_for_ever, tmp_path) as writer:
            saved, seconds = 0, 0.0
            # The first step of a process takes longer than the others.
            for _ in range(3):
                assert writer.channel.poll(SECONDS)
                saved, seconds = writer.channel.recv()
            # At any moment of a step and its save, as long as they take here.
            time.sleep(moments.uniform(0.0, seconds))
            writer.signal(signal.SIGKILL)
            saved, _ = last_said(writer.channel) or (saved, seconds)
        killed += 1
        in_the_middle += any(name.startswith(".") for name in listed(tmp_path))
        run = Run()
        run.load(tmp_path)
        assert run.step in (saved, saved + 1)  # the last that is known, or one that was not yet reported
        assert run.now() == straight[run.step]
        run.save(tmp_path)
        assert len(listed(tmp_path)) == 2
        assert not any(name.startswith(".") for name in listed(tmp_path))
        del run  # which has the directory to itself as long as it lives
        gc.collect()


def die_before_operation(connection: Connection, path: Path, number: int) -> None:
    """Save, and be killed before the operation of that number on the directory."""
    torch.set_num_threads(1)
    run = Run()
    run.load(path)
    run.train()
    passed: list[str] = []

    def count(what: str) -> None:
        if len(passed) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        passed.append(what)

    real = os.fsync

    def fsync(descriptor: int) -> None:
        count("fsync")
        real(descriptor)

    def heed(event: str, args: tuple[Any, ...]) -> None:
        # Whatever Python asks of the system has an event, but for fsync. What rmtree removes has relative names.
        named = ("open", "os.mkdir", "os.rename", "os.scandir", "shutil.rmtree")
        if event in ("os.remove", "os.rmdir") or (event in named and str(args[0]).startswith(str(path))):
            count(event)

    os.fsync = fsync
    sys.addaudithook(heed)
    checkpoint.save(path, run.net, run.optimizer, run.step, keep=1)
    connection.send(passed)


def test_whichever_operation_is_the_last_there_is_a_whole_checkpoint(tmp_path: Path) -> None:
    straight, seen, operations = Straight(), [], []
    run = Run()
    run.train()
    run.save(tmp_path / "before")
    while not operations:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(tmp_path / "before", tmp_path / "run")
        with forked(die_before_operation, tmp_path / "run", len(seen)) as writer:
            assert wait_for_end(writer, SECONDS)
            operations = last_said(writer.channel) or []
        assert writer.exit_code == (0 if operations else -signal.SIGKILL)
        for name in listed(tmp_path / "run"):
            if not name.startswith("."):  # whatever is there is whole, be it the last or not
                alone = tmp_path / f"{name} after {len(seen)}"
                shutil.copytree(tmp_path / "run" / name, alone / name)
                found = Run()
                found.load(alone)
                assert found.now() == straight[found.step]
        found = Run()
        found.load(tmp_path / "run")
        assert found.now() == straight[found.step]
        seen.append(found.step)
        found.save(tmp_path / "run")
        assert not any(name.startswith(".") for name in listed(tmp_path / "run"))
    assert {"open", "fsync", "os.mkdir", "os.rename", "os.remove", "os.rmdir"} <= set(operations)
    # The old one up to the first rename, the new one from then on.
    assert seen == [1] * (operations.index("os.rename") + 1) + [2] * (len(operations) - operations.index("os.rename"))


# Two ranks -----------------------------------------------------------------------------------------------------------


def save_until_killed(rank: int, world_size: int, paths: list[Path], victim: int, after: float) -> None:
    run = Run(rank)
    run.load(paths[rank])
    for saved in itertools.count():
        if rank == victim and saved == 2:
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        run.train()
        run.save(paths[rank])


def go_on(rank: int, world_size: int, paths: list[Path]) -> tuple[int, str, str]:
    """What there is, and what a run has that never stopped."""
    run, straight = Run(rank), Run(rank)
    run.load(paths[rank])
    while straight.step < run.step:
        straight.train()
    run.save(paths[rank])
    return run.step, run.now(), straight.now()


@pytest.mark.parametrize("machines", [1, 2])
def test_one_of_two_ranks_is_killed(machines: int, tmp_path: Path) -> None:
    moments = random.Random(machines)
    paths = [tmp_path / f"machine{rank % machines}" for rank in range(2)]
    reached = 0
    for episode in range(EPISODES):
        victim, after = episode % 2, moments.uniform(0.0, 0.1)
        errors = run_ranks_expecting_errors(save_until_killed, 2, paths, victim, after)
        assert [error.type_name for error in errors] == (
            ["ProcessDied", "PeerLost"] if victim == 0 else ["PeerLost", "ProcessDied"]
        )
        outcomes = run_ranks(go_on, 2, paths)
        assert len({step for step, _, _ in outcomes}) == 1
        for step, state, expected in outcomes:
            assert state == expected
            assert step >= reached
            reached = step
        for path in paths:
            assert not any(name.startswith(".") for name in listed(path))
    assert reached >= 2 * EPISODES

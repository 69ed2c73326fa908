"""Two runs in one directory of checkpoints: the second is refused, on all its ranks, before it writes anything."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.distributed.checkpoint_runs import listed
from tests.harness import forked, run_ranks, wait_for_end
from thinwire import checkpoint
from thinwire.testbed.supervisor import Child

SAVES = 100
SECONDS = 60


class Run:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(5, 3)
        self.optimizer = thinwire.Birder(self.net.parameters(), lr=0.01)

    def save(self, path: Path, step: int = 1, **options: Any) -> Path:
        return checkpoint.save(path, self.net, self.optimizer, step, **options)

    def load(self, path: Path) -> int:
        found = checkpoint.load(path, self.net, self.optimizer)
        return -1 if found is None else found.step


@contextmanager
def process(target: Callable[..., None], *args: Any) -> Iterator[tuple[Child, Any]]:
    """Another process, and the first thing that it says."""
    with forked(target, *args) as other:
        assert other.channel.poll(SECONDS)
        yield other, other.channel.recv()


def kill(process: Child) -> None:
    process.signal(signal.SIGKILL)
    assert wait_for_end(process)


def save_and_stay(connection: Connection, path: Path) -> None:
    torch.set_num_threads(1)
    run = Run()
    run.save(path)
    (path / ".0123456789abcdef.tmp").mkdir()  # as if it were at the next
    connection.send(os.getpid())
    connection.recv()


def everything(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*"))


# One process and another ---------------------------------------------------------------------------------------------


def test_a_second_run_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run = Run()
    with process(save_and_stay, tmp_path) as (first, pid):
        before = everything(tmp_path)
        for _ in range(3):
            with pytest.raises(
                BlockingIOError, match=rf"in use by another run \(process {pid} on .*Choose another"
            ) as e:
                run.save(tmp_path, 2)
            assert e.value.errno == errno.EWOULDBLOCK
        assert everything(tmp_path) == before
        assert ".0123456789abcdef.tmp" in before
        assert run.load(tmp_path) == 1  # who only reads is welcome
        run.save(tmp_path / "other")
        kill(first)
        run.save(tmp_path, 2)  # the lock has died with its process
    assert listed(tmp_path) == ["000001-step-1", "000002-step-2", "other"]


def test_whoever_only_loads_keeps_nobody_out(tmp_path: Path) -> None:
    with process(save_and_stay, tmp_path):
        pass
    run = Run()
    assert run.load(tmp_path) == 1
    shutil.rmtree(tmp_path / ".0123456789abcdef.tmp")
    with process(save_and_stay, tmp_path):
        assert run.load(tmp_path) == 1


def test_a_directory_is_free_when_the_optimizer_is_gone(tmp_path: Path) -> None:
    run = Run()
    run.save(tmp_path)
    assert is_held(tmp_path)
    del run
    gc.collect()
    assert not is_held(tmp_path)
    with process(save_and_stay, tmp_path):
        pass
    assert listed(tmp_path) == [".0123456789abcdef.tmp", "000001-step-1", "000002-step-1"]


def test_a_directory_is_free_when_the_optimizer_is_closed(tmp_path: Path) -> None:
    run, other = Run(), Run()
    run.save(tmp_path)
    other.save(tmp_path)
    run.optimizer.close()
    assert is_held(tmp_path)
    other.optimizer.close()
    assert not is_held(tmp_path)


def is_held(path: Path) -> bool:
    with open(path / ".lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_lock_file_that_was_left_behind_locks_nothing(tmp_path: Path) -> None:
    for contents in (b"", b"\xff\xfe garbage", b"0123456789abcdef process 1 on nowhere\n" * 1000):
        (tmp_path / ".lock").write_bytes(contents)
        Run().save(tmp_path)
        assert (tmp_path / ".lock").stat().st_size < 200


# One process, several optimizers -------------------------------------------------------------------------------------


def test_optimizers_of_one_process_take_turns(tmp_path: Path) -> None:
    first, second = Run(), Run()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for turn in range(3):
        first.save(tmp_path / "run", 2 * turn)
        second.save(tmp_path / "link", 2 * turn + 1)
    assert listed(tmp_path / "run") == ["000004-step-3", "000005-step-4", "000006-step-5"]
    del first
    gc.collect()
    assert is_held(tmp_path / "run")
    del second
    gc.collect()
    assert not is_held(tmp_path / "run")


def descriptors() -> int:
    """How many this process has open."""
    gc.collect()  # optimizers of earlier tests hold locks until they are collected, which may be at any moment
    return len(os.listdir("/proc/self/fd"))


def test_many_saves_leave_no_descriptors(tmp_path: Path) -> None:
    run = Run()
    run.save(tmp_path, keep=1)
    before = descriptors()
    for step in range(SAVES):
        run.save(tmp_path, step, keep=1)
    assert descriptors() == before


def test_directories_that_are_removed_leave_no_descriptors(tmp_path: Path) -> None:
    run = Run()
    run.save(tmp_path / "run")
    before = descriptors()
    for _ in range(20):
        shutil.rmtree(tmp_path / "run")
        run.save(tmp_path / "run")
        assert is_held(tmp_path / "run")
    assert descriptors() == before


def test_refused_saves_leave_no_descriptors(tmp_path: Path) -> None:
    run = Run()
    with process(save_and_stay, tmp_path):
        before = descriptors()
        for _ in range(20):
            with pytest.raises(BlockingIOError):
                run.save(tmp_path)
        assert descriptors() == before


# Processes that are forked -------------------------------------------------------------------------------------------


def save_and_leave_a_child(connection: Connection, path: Path) -> None:
    """As a process does that is killed while its DataLoader has workers."""
    torch.set_num_threads(1)
    run = Run()
    run.save(path)
    child = os.fork()
    if not child:
        # The child says it, not its parent: by now it has let go of the lock.
        connection.send(os.getpid())
        connection.close()
        time.sleep(SECONDS)
        os._exit(0)
    connection.recv()


def test_a_forked_process_does_not_keep_the_lock_of_its_parent(tmp_path: Path) -> None:
    with process(save_and_leave_a_child, tmp_path) as (parent, child):
        try:
            assert is_held(tmp_path)
            kill(parent)
            os.kill(child, 0)  # it is alive
            assert not is_held(tmp_path)
        finally:
            os.kill(child, 9)


def save_in_a_child(connection: Connection, path: Path) -> None:
    torch.set_num_threads(1)
    run = Run()
    run.save(path)
    child = os.fork()
    if not child:
        try:
            run.save(path, 2)
        except BlockingIOError:
            os._exit(3)
        os._exit(0)
    connection.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    connection.recv()


def test_a_forked_process_is_another_run(tmp_path: Path) -> None:
    with process(save_in_a_child, tmp_path) as (_, status):
        assert status == 3
        assert is_held(tmp_path)
    assert listed(tmp_path) == ["000001-step-1"]


# Several ranks -------------------------------------------------------------------------------------------------------


def save_on_machines(rank: int, world_size: int, paths: list[Path]) -> tuple[str, str, str]:
    """Every rank twice, with two optimizers; then what was raised, if anything was."""
    runs = [Run(), Run()]
    try:
        for step in range(4):
            runs[step % 2].save(paths[rank], step)
    except OSError as error:
        return type(error).__name__, str(error.errno), str(error)
    return "", "", ""


def test_ranks_of_one_run_share_a_directory(tmp_path: Path) -> None:
    assert run_ranks(save_on_machines, 3, [tmp_path] * 3) == [("", "", "")] * 3
    assert listed(tmp_path) == ["000002-step-1", "000003-step-2", "000004-step-3"]
    assert run_ranks(save_on_machines, 2, [tmp_path] * 2) == [("", "", "")] * 2  # after a restart


def test_all_ranks_are_refused_together(tmp_path: Path) -> None:
    with process(save_and_stay, tmp_path) as (_, pid):
        before = everything(tmp_path)
        for name, number, text in run_ranks(save_on_machines, 3, [tmp_path] * 3):
            assert (name, number) == ("BlockingIOError", str(errno.EWOULDBLOCK))
            assert f"path='{tmp_path}' is in use by another run (process {pid} on" in text
        assert everything(tmp_path) == before


def test_all_ranks_are_refused_for_the_machine_of_one(tmp_path: Path) -> None:
    busy, free = tmp_path / "busy", tmp_path / "free"
    with process(save_and_stay, busy) as (_, pid):
        before = everything(busy)
        for name, _, text in run_ranks(save_on_machines, 3, [free, free, busy]):
            assert name == "BlockingIOError"
            assert f"rank 2: path='{busy}' is in use by another run (process {pid} on" in text
        assert everything(busy) == before
        assert listed(free) == []
    assert run_ranks(save_on_machines, 3, [free, free, busy]) == [("", "", "")] * 3


def refused_then_elsewhere(rank: int, world_size: int, paths: list[Path]) -> bool:
    """A run that was refused because of one machine keeps no lock on another."""
    run = Run()
    with pytest.raises(BlockingIOError):
        run.save(paths[rank])
    return rank == 0 and is_held(paths[0])  # one at a time: to look is to take the lock for a moment


def test_a_run_that_was_refused_keeps_nobody_out(tmp_path: Path) -> None:
    with process(save_and_stay, tmp_path / "busy"):
        assert run_ranks(refused_then_elsewhere, 2, [tmp_path / "free", tmp_path / "busy"]) == [False, False]


# File systems without locks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_told_of_once(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such file system is at hand: it is as if the system call said so."""

    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    run = Run()
    with pytest.warns(
        RuntimeWarning, match=rf"path='{tmp_path}' is on a file system without locks.*of its own"
    ) as told:
        run.save(tmp_path)
    assert told[0].filename == __file__
    run.save(tmp_path)
    Run().save(tmp_path)
    assert len(listed(tmp_path)) == 3


def test_a_lock_that_fails_for_another_reason_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        Run().save(tmp_path)
    assert listed(tmp_path) == []

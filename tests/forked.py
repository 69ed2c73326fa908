"""Ranks that end as programs do, for what can go wrong while an interpreter exits.

    ended = run_to_the_end([Run(function, 3, (argument,))])       # [[Ended of rank 0, of rank 1, of rank 2]]

The ranks of `tests.harness` leave by os._exit. These run `function(rank, world_size, *args)` with a process group, and
then leave through the whole exit of Python. All clocks are `time.monotonic()`, which all processes of a machine share.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.harness import fork_server
from thinwire.testbed.supervisor import Child, Supervisor

START_SECONDS = 60.0
"""Within which all ranks of a run must have started."""
SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class Run:
    """Some ranks."""

    function: Callable[..., Any]
    """By its name in a module."""
    world_size: int
    args: tuple[Any, ...] = ()
    timeout: float = 60.0
    """Of the process group, in seconds."""
    stops: int | None = None
    """The rank that stops itself. It is continued when all others have ended."""
    deadline: float = 30.0
    """Seconds after which ranks that have not ended are said to hang, and are killed."""
    in_haste: bool = False
    """Leave by os._exit after all, where the end is not what is tested: an interpreter takes half a second to exit."""


@dataclass(frozen=True)
class Ended:
    """What became of a rank."""

    report: Any
    """What its function has returned; None if it has not."""
    status: int | None
    """Its exit code, the negative number of the signal that ended it, or None if it hung."""
    at: float
    """When."""
    log: str
    """What it has written to stdout and stderr; of one that hung, also where all its threads were."""


def run_to_the_end(runs: Sequence[Run], at_once: int = 24) -> list[list[Ended]]:
    """Run all of them, with at most so many processes at a time; what became of every rank of every run."""
    with Supervisor(fork_server(), grace=0.0) as children:
        waiting, running, started = list(runs), [], []
        while waiting or running:
            if waiting and (not children.alive or len(children.alive) + waiting[0].world_size <= at_once):
                run = _Running(children, waiting.pop(0), children.folder / f"run-{len(started)}")
                started.append(run)
                running.append(run)
                continue
            nearest = min(run.deadline for run in running)
            # Not longer: a rank that stops itself after all others have ended causes no event.
            reports = children.receive(min(nearest - time.monotonic(), SECONDS_BETWEEN_LOOKS))
            for run in running:
                run.reports |= {child.pid: report for child, report in reports if child in run.ranks}
                run.look_after()
            running = [run for run in running if run.alive]
        return [run.ended() for run in started]


class _Running:
    """The ranks of a run that has started."""

    def __init__(self, children: Supervisor, run: Run, directory: Path) -> None:
        directory.mkdir()
        self._run = run
        self.deadline = time.monotonic() + run.deadline
        """When to look after it although nothing has happened."""
        self.ranks = [
            children.start(_be_rank, run, rank, directory, log=directory / f"{rank}.log", supervised=False)
            for rank in range(run.world_size)
        ]
        self.reports: dict[int, Any] = {}
        self._hung: set[Child] = set()

    @property
    def alive(self) -> list[Child]:
        return [rank for rank in self.ranks if rank.exit_code is None]

    def look_after(self) -> None:
        """Continue the rank that has stopped, if it is time, and end what takes too long."""
        stopped = None if self._run.stops is None else self.ranks[self._run.stops]
        if self.alive == [stopped]:
            # Every time: the last of the others may have ended just before this rank stops itself.
            self.alive[0].signal(signal.SIGCONT)
        if time.monotonic() > self.deadline:
            for rank in self.alive:
                self._hung.add(rank)
                rank.signal(signal.SIGCONT)
                rank.signal(signal.SIGUSR1)  # writes the stacks of all threads
                time.sleep(0.2)
                rank.signal(signal.SIGKILL)
            self.deadline = time.monotonic() + START_SECONDS

    def ended(self) -> list[Ended]:
        """What became of each rank."""
        return [
            Ended(
                report=self.reports.get(rank.pid),
                status=None if rank in self._hung else rank.exit_code,
                at=rank.ended_at,
                log="" if rank.log is None else rank.log.read_text(),
            )
            for rank in self.ranks
        ]


def _be_rank(channel: Connection, run: Run, rank: int, directory: Path) -> None:
    faulthandler.register(signal.SIGUSR1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    timeout = timedelta(seconds=run.timeout)
    store = _meet(run, rank, directory, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=run.world_size, timeout=timeout)
    channel.send(run.function(rank, run.world_size, *run.args))
    if run.in_haste:
        os._exit(0)


def _meet(run: Run, rank: int, directory: Path, timeout: timedelta) -> dist.Store:
    """A store in rank 0, as for programs that torchrun has not started; when all ranks are there."""
    files = dist.FileStore(str(directory / "store"), run.world_size)
    files.set_timeout(timedelta(seconds=START_SECONDS))
    own = None
    if rank == 0:
        own = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
        files.set("port", str(own.port))
    files.set(f"started/{rank}", "")
    files.wait(["port", *(f"started/{other}" for other in range(run.world_size))])
    return own or dist.TCPStore("127.0.0.1", int(files.get("port")), timeout=timeout)

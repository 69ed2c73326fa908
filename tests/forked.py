"""Ranks that end as programs do, for what can go wrong while an interpreter exits.

    ended = run_to_the_end([Run(function, 3, (argument,))])       # [[Ended of rank 0, of rank 1, of rank 2]]

Children of multiprocessing leave by os._exit. These are forked by a program, `python -m tests.forked`, that has
imported torch once; each runs `function(rank, world_size, *args)` with a process group, and then leaves the main module
by its end. All clocks are `time.monotonic()`, which all processes of a machine share.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.parallel

import thinwire  # noqa: F401  imported once for all ranks

ROOT = Path(__file__).parents[1]
START_SECONDS = 60.0
"""Within which all ranks of a run must have started."""


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
    with tempfile.TemporaryDirectory(prefix="thinwire-forked-") as name:
        directory = Path(name)
        (directory / "runs").write_bytes(pickle.dumps((list(runs), at_once)))
        subprocess.run([sys.executable, "-m", "tests.forked", name], cwd=ROOT, check=True)
        return pickle.loads((directory / "ended").read_bytes())


# The program ---------------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    run: Run
    directory: Path
    began: float
    ranks: dict[int, int] = field(default_factory=dict)
    """By process."""
    ended: dict[int, Ended] = field(default_factory=dict)
    continued: bool = False

    def end(self, pid: int, status: int | None) -> None:
        rank = self.ranks.pop(pid)
        report = self.directory / f"{rank}.report"
        self.ended[rank] = Ended(
            report=pickle.loads(report.read_bytes()) if report.exists() else None,
            status=status,
            at=time.monotonic(),
            log=(self.directory / f"{rank}.log").read_text(),
        )

    def look_after(self) -> None:
        """Continue who has stopped, if it is time, and end what takes too long."""
        if list(self.ranks.values()) == [self.run.stops] and not self.continued:
            self.continued = True
            os.kill(next(iter(self.ranks)), signal.SIGCONT)
        if time.monotonic() > self.began + self.run.deadline:
            for pid in list(self.ranks):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGUSR1)  # tell where all threads are
                time.sleep(0.2)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self.end(pid, None)


def main(name: str) -> None:
    """Start all runs, and wait for their ranks. Ranks return from here too, when they are done."""
    directory = Path(name)
    gc.freeze()  # or every rank would go through all of torch once more when it exits
    runs, at_once = pickle.loads((directory / "runs").read_bytes())
    waiting, running, done = list(enumerate(runs)), {}, {}
    while waiting or running:
        alive = sum(len(each.ranks) for each in running.values())
        if waiting and (not alive or alive + waiting[0][1].world_size <= at_once):
            number, run = waiting.pop(0)
            mine = _Running(run, directory / str(number), time.monotonic())
            mine.directory.mkdir()
            for rank in range(run.world_size):
                pid = os.fork()
                if pid == 0:
                    _be_rank(run, rank, mine.directory)
                    return
                mine.ranks[pid] = rank
            running[number] = mine
        pid, status = os.waitpid(-1, os.WNOHANG) if running else (0, 0)
        for number, mine in list(running.items()):
            if pid in mine.ranks:
                mine.end(pid, os.waitstatus_to_exitcode(status))
            mine.look_after()
            if not mine.ranks:
                done[number] = [ended for _, ended in sorted(running.pop(number).ended.items())]
        if not pid:
            time.sleep(0.01)
    (directory / "ended").write_bytes(pickle.dumps([done[number] for number in range(len(runs))]))


def _be_rank(run: Run, rank: int, directory: Path) -> None:
    log = os.open(directory / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    timeout = timedelta(seconds=run.timeout)
    store = _meet(run, rank, directory, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=run.world_size, timeout=timeout)
    report = run.function(rank, run.world_size, *run.args)
    (directory / f"{rank}.report").write_bytes(pickle.dumps(report))
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


if __name__ == "__main__":
    from tests.forked import main as program  # whose classes are those that the tests know

    program(sys.argv[1])

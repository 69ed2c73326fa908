"""The ranks as their supervisor sees them: one process each, on one host each."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from thinwire.cli.chaos.worker import LONGEST_REPORT, Orders
from thinwire.testbed.signals import signals_deferred

SECONDS_TO_IMPORT = 120.0
SECONDS_TO_DIE = 10.0
SECONDS_FOR_STACKS = 1.0
_LAST_BYTES = 6000


@dataclass(frozen=True)
class Raised:
    """What ended a rank, by its own account."""

    stage: str
    types: list[str]
    """Its class and the classes above."""
    message: str
    digest: str
    """Of the parameters then."""


@dataclass(frozen=True)
class Result:
    """What a rank has at the end of an episode."""

    digest: str
    skipped: int


@dataclass
class Rank:
    """A process, and what it has told so far."""

    orders: Orders
    pid: int
    pidfd: int
    line: socket.socket
    joined: bool = False
    """Whether it has a process group."""
    restored: int | None = None
    """The step it goes on from; None while it starts."""
    digests: dict[int, str] = field(default_factory=dict)
    """Of the parameters after each step."""
    saved: int = 0
    """The step of its last checkpoint."""
    corrupted: str = ""
    """What it has sent last that was changed on its way: something that goes "once", or "twice" over."""
    result: Result | None = None
    raised: Raised | None = None
    code: int | None = None
    """Its exit code, -n for signal n; None while it lives."""
    noticed_at: float = 0.0
    """When it had raised or finished, and"""
    ended_at: float = 0.0
    """when it had ended."""
    _starved_before: dict[str, float] = field(default_factory=dict)
    _dismissed: bool = False

    @property
    def number(self) -> int:
        """Its rank."""
        return self.orders.rank

    @property
    def step(self) -> int:
        """The last step that it has taken; -1 while it starts."""
        return max(self.digests, default=-1)

    @property
    def steps_taken(self) -> int:
        """Since it was started."""
        return max(0, len(self.digests) - 1)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing happens if it has ended."""
        if self.code is None:
            signal.pidfd_send_signal(self.pidfd, number)

    def tell(self, word: str) -> None:
        """Say something to it; nobody hears if it has ended."""
        try:
            self.line.send(word.encode())
        except (BrokenPipeError, ConnectionResetError):
            return

    def dismiss(self) -> None:
        """Let it leave, now that it has finished."""
        if not self._dismissed:
            self._dismissed = True
            self.tell("leave")

    def stacks(self) -> str:
        """What all its threads are at."""
        self.signal(signal.SIGUSR1)
        time.sleep(SECONDS_FOR_STACKS)
        waits = [f"thread {task.name} waits in {_end_of(task / 'wchan')}" for task in self._threads()]
        return "\n".join([_end_of(Path(self.orders.stacks)), *waits])

    def begin_to_count(self) -> None:
        """From now on `starved` counts."""
        self._starved_before = self._waits_for_cores()

    def starved(self) -> float:
        """Seconds for which one of its threads could have gone on, but waited for one of this machine's cores."""
        waits = self._waits_for_cores()
        return max((waited - self._starved_before.get(thread, 0.0) for thread, waited in waits.items()), default=0.0)

    def _waits_for_cores(self) -> dict[str, float]:
        figures = {task.name: _end_of(task / "schedstat").split() for task in self._threads()}
        return {thread: int(columns[1]) / 1e9 for thread, columns in figures.items() if columns}

    def _threads(self) -> list[Path]:
        return sorted(Path(f"/proc/{self.pid}/task").glob("*"))

    def log(self) -> str:
        """The end of its output, without gloo's news about its connections."""
        lines = _end_of(Path(self.orders.log)).splitlines()
        return "\n".join(line for line in lines if not line.startswith("[Gloo]"))

    def hear(self, event: str, told: dict[str, Any]) -> None:
        """Take down what it tells."""
        match event:
            case "joined":
                self.joined = True
            case "ready":
                self.restored = self.saved = told["step"]
                self.digests[told["step"]] = told["digest"]
            case "step":
                self.digests[told["step"]] = told["digest"]
            case "saved":
                self.saved = told["step"]
            case "corrupted":
                self.corrupted = "twice" if told["twice"] else "once"
            case "done":
                self.result = Result(**told)
                self.noticed_at = time.monotonic()
            case "raised":
                self.raised = Raised(**told)
                self.noticed_at = time.monotonic()
            case unknown:
                raise ValueError(f"rank {self.number} tells of {unknown!r}")


class Nursery:
    """The process that forks ranks.

    Args:
        module: what it runs.
    """

    def __init__(self, module: str = "thinwire.cli.chaos.nursery") -> None:
        self._module = module
        self._undo = ExitStack()

    def __enter__(self) -> Nursery:
        with signals_deferred(), ExitStack() as undo:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._control = undo.enter_context(ours)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", self._module, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    # Ctrl-C in a terminal is for us.
                    start_new_session=True,
                    # Ranks share the cores; and whoever forks should have no threads.
                    env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                )
            undo.callback(self._end, process)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with signals_deferred():
            self._undo.close()

    def wait(self) -> None:
        """Return when it is ready to fork."""
        self._control.settimeout(SECONDS_TO_IMPORT)
        self._answer()

    def fork(self, orders: Orders) -> Rank:
        """Start a rank."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            message = json.dumps({"orders": orders.to_json()}).encode()
            socket.send_fds(self._control, [message], [theirs.fileno()])
        pid = self._answer()["pid"]
        return Rank(orders, pid, os.pidfd_open(pid), ours)

    def reap(self, rank: Rank) -> int:
        """The exit code of a rank that has ended."""
        self._control.send(json.dumps({"reap": rank.pid}).encode())
        return self._answer()["code"]

    def _answer(self) -> dict[str, Any]:
        message = self._control.recv(LONGEST_REPORT)
        if not message:
            raise RuntimeError("the process that forks the ranks has ended; stderr says why")
        return json.loads(message)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        # Its ranks, if there are any left, die with it.
        self._control.close()
        try:
            process.wait(SECONDS_TO_DIE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Incarnation:
    """All ranks of an episode, from one start to one end. No process outlives the block.

    Args:
        nursery: who starts them.
        orders: for each of them, in the order of ranks.
    """

    def __init__(self, nursery: Nursery, orders: Iterable[Orders]) -> None:
        self._nursery = nursery
        self._orders = list(orders)
        self._events = selectors.DefaultSelector()
        self.ranks: list[Rank] = []

    def __enter__(self) -> Incarnation:
        try:
            with signals_deferred():
                for orders in self._orders:
                    rank = self._nursery.fork(orders)
                    self.ranks.append(rank)
                    self._events.register(rank.line, selectors.EVENT_READ, (rank, "line"))
                    self._events.register(rank.pidfd, selectors.EVENT_READ, (rank, "end"))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with signals_deferred():
            for rank in self.ranks:
                rank.signal(signal.SIGKILL)
            for rank in self.ranks:
                if rank.code is None:
                    rank.code = self._nursery.reap(rank)
                rank.line.close()
                os.close(rank.pidfd)
            self._events.close()

    @property
    def living(self) -> list[Rank]:
        """Those that have not ended."""
        return [rank for rank in self.ranks if rank.code is None]

    @property
    def failed(self) -> bool:
        """Whether anybody has raised or ended without having finished."""
        return any(rank.raised is not None or (rank.code is not None and rank.result is None) for rank in self.ranks)

    @property
    def finished(self) -> bool:
        """Whether all have finished."""
        return all(rank.result is not None for rank in self.ranks)

    def listen(self, seconds: float) -> None:
        """Hear what there is to hear within a time, and return as soon as anything was."""
        for key, _ in self._events.select(max(0.0, seconds)):
            rank, what = key.data
            if what == "end":
                self._events.unregister(rank.pidfd)
                # What it said last may still be under way to us.
                self._hear(rank)
                rank.ended_at = time.monotonic()
                rank.code = self._nursery.reap(rank)
            else:
                self._hear(rank)

    def _hear(self, rank: Rank) -> None:
        while True:
            try:
                message = rank.line.recv(LONGEST_REPORT, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                message = b""
            if not message:
                if rank.line.fileno() in self._events.get_map():
                    self._events.unregister(rank.line)
                return
            told = json.loads(message)
            rank.hear(told.pop("event"), told)


def _end_of(path: Path) -> str:
    """The last lines of a file; empty if it is gone, as those of threads may be."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return data[-_LAST_BYTES:].decode(errors="replace")

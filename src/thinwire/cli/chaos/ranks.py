"""The ranks of `thinwire chaos`: one process on each host, with what it has reported."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from thinwire.cli.chaos.worker import RankConfig
from thinwire.testbed.forkserver import ForkServer
from thinwire.testbed.supervisor import Child, Supervisor

SECONDS_FOR_STACKS = 1.0
_LAST_BYTES = 6000


@dataclass(frozen=True)
class RankError:
    """What a rank raised."""

    stage: str
    types: list[str]
    """Its class and the classes above."""
    message: str
    digest: str
    """Of the parameters then."""


@dataclass(frozen=True)
class RankResult:
    """What a rank has at the end of an episode."""

    digest: str
    skipped: int


@dataclass(eq=False)
class Rank:
    """A rank and what it has reported so far."""

    config: RankConfig
    child: Child
    joined: bool = False
    """Whether it has a process group."""
    restored: int | None = None
    """The step that it continues from; None while it starts."""
    digests: dict[int, str] = field(default_factory=dict)
    """Of the parameters after each step."""
    saved_digests: dict[int, str] = field(default_factory=dict)
    """Of the parameters in each checkpoint, which local steps before it have made equal."""
    saved: int = 0
    """The step of its last checkpoint."""
    corrupted: str = ""
    """The last packet that it sent with a flipped bit: one that has its content "once", or "twice"."""
    result: RankResult | None = None
    raised: RankError | None = None
    noticed_at: float = 0.0
    """When it had raised or finished."""
    _waited_before: dict[str, float] = field(default_factory=dict)
    _waited: dict[str, float] = field(default_factory=dict)
    """By thread, also of threads that have ended."""
    _dismissed: bool = False

    @property
    def exit_code(self) -> int | None:
        """-n for signal n; None while it runs."""
        return self.child.exit_code

    @property
    def ended_at(self) -> float:
        """When it had ended."""
        return self.child.ended_at

    @property
    def number(self) -> int:
        """Its rank."""
        return self.config.rank

    @property
    def step(self) -> int:
        """The last step that it has taken; -1 while it starts."""
        return max(self.digests, default=-1)

    @property
    def last_digest(self) -> str:
        """Of the parameters after the last step; if it saved them then, after that, which makes some ranks equal."""
        return self.saved_digests.get(self.step) or self.digests.get(self.step, "")

    @property
    def steps_taken(self) -> int:
        """Since it was started."""
        return max(0, len(self.digests) - 1)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; does nothing if it has ended."""
        self.child.signal(number)

    def send(self, message: str) -> None:
        """Send it a message, which is lost if it has ended."""
        self.child.send(message)

    def dismiss(self) -> None:
        """Let it leave, now that it has finished."""
        if not self._dismissed:
            self._dismissed = True
            self.send("leave")

    def stacks(self) -> str:
        """What all its threads are at."""
        self.signal(signal.SIGUSR1)
        time.sleep(SECONDS_FOR_STACKS)
        waits = [f"thread {task.name} waits in {_end_of(task / 'wchan')}" for task in self._threads()]
        return "\n".join([_end_of(Path(self.config.stacks)), *waits])

    def begin_to_count(self) -> None:
        """From now on `starved` counts."""
        self._waited_before = self._waits_for_cores()
        self._waited = dict(self._waited_before)

    def starved(self) -> float:
        """Seconds for which its threads could have gone on, but waited for one of this machine's cores.

        All threads together, because one may wait for another that waits for a core. What a thread has waited after the
        last call is lost when it ends: call this often.
        """
        self._waited |= self._waits_for_cores()
        return sum(waited - self._waited_before.get(thread, 0.0) for thread, waited in self._waited.items())

    def _waits_for_cores(self) -> dict[str, float]:
        return {task.name: waited for task in self._threads() if (waited := seconds_without_core(task)) is not None}

    def _threads(self) -> list[Path]:
        # The number of a process that has ended may be that of another.
        return sorted(Path(f"/proc/{self.child.pid}/task").glob("*")) if self.exit_code is None else []

    def log(self) -> str:
        """The end of its output."""
        return "\n".join(self.child.log_lines())

    def take(self, event: str, details: dict[str, Any]) -> None:
        """Record what it reports."""
        match event:
            case "joined":
                self.joined = True
            case "ready":
                self.restored = self.saved = details["step"]
                self.digests[details["step"]] = details["digest"]
            case "step":
                self.digests[details["step"]] = details["digest"]
            case "saved":
                self.saved = details["step"]
                self.saved_digests[details["step"]] = details["digest"]
            case "corrupted":
                self.corrupted = "twice" if details["twice"] else "once"
            case "done":
                self.result = RankResult(**details)
                self.noticed_at = time.monotonic()
            case "raised":
                self.raised = RankError(**details)
                self.noticed_at = time.monotonic()
            case unknown:
                raise ValueError(f"rank {self.number} reports an unknown event {unknown!r}")


class Attempt:
    """All ranks of an episode, from one start to their end. No process outlives the block.

    Args:
        server: forks the ranks.
        train: what each rank runs.
        configs: one per rank, in rank order.
    """

    def __init__(
        self, server: ForkServer, train: Callable[[Connection, RankConfig], None], configs: Iterable[RankConfig]
    ) -> None:
        self._children = Supervisor(server, grace=0.0)
        self._train, self._configs = train, list(configs)
        self.ranks: list[Rank] = []

    def __enter__(self) -> Attempt:
        self._children.__enter__()
        try:
            for config in self._configs:
                # They end as any program does: the exit of Python is part of what is tested.
                child = self._children.start(
                    self._train, config, namespace=config.namespace, log=Path(config.log), supervised=False
                )
                self.ranks.append(Rank(config, child))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._children.__exit__(kind, error, trace)

    @property
    def alive(self) -> list[Rank]:
        """Those that have not ended."""
        return [rank for rank in self.ranks if rank.exit_code is None]

    @property
    def failed(self) -> bool:
        """Whether a rank has raised, or has ended without a result."""
        return any(
            rank.raised is not None or (rank.exit_code is not None and rank.result is None) for rank in self.ranks
        )

    @property
    def finished(self) -> bool:
        """Whether all ranks have their result."""
        return all(rank.result is not None for rank in self.ranks)

    def receive(self, seconds: float) -> None:
        """Wait until a rank reports something or ends, but no longer than so many seconds."""
        ranks = {rank.child: rank for rank in self.ranks}
        for child, (event, details) in self._children.receive(seconds):
            ranks[child].take(event, details)


def seconds_without_core(task: Path) -> float | None:
    """For how long a thread, by its folder in /proc, has waited for a core; None if it is gone."""
    columns = _end_of(task / "schedstat").split()
    return int(columns[1]) / 1e9 if columns else None


def _end_of(path: Path) -> str:
    """The last lines of a file; empty if it is gone, as those of threads may be."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return data[-_LAST_BYTES:].decode(errors="replace")

"""The ranks of `thinwire bench step` on a testbed: all carry out a command, or the measurement fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.cli.step.worker import ALIVE, run_rank
from thinwire.testbed import Testbed
from thinwire.testbed.supervisor import ChildError, Supervisor


class MeasurementError(RuntimeError):
    """A measurement failed. The message is one line, for the report."""


class Ranks:
    """One process per rank, on all hosts of a testbed. No process outlives the block.

    Args:
        testbed: the hosts.
        per_host: ranks per host.
        on_life: called when a rank reports that it makes progress.
    """

    def __init__(self, testbed: Testbed, per_host: int, on_life: Callable[[], None]) -> None:
        self._testbed, self._per_host, self._on_life = testbed, per_host, on_life
        self._ranks = Supervisor()

    def __enter__(self) -> Ranks:
        self._ranks.__enter__()
        try:
            for rank, (host, environment) in enumerate(self._testbed.places(self._per_host)):
                log = self._ranks.folder / f"rank-{rank}.log"
                self._ranks.start(run_rank, namespace=host.namespace, environment=environment, log=log)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks.__exit__(None, None, None)

    @property
    def pids(self) -> list[int]:
        """The processes, in rank order."""
        return [rank.pid for rank in self._ranks]

    def command(self, patience: float, verb: str, **arguments: Any) -> list[Any]:
        """Have all ranks carry out a command. Returns the answer of each, in rank order.

        Raises:
            MeasurementError: when a rank fails or ends, or when no rank reports progress for `patience` seconds. The
                others may wait for it: leave the block.
        """
        for rank in self._ranks:
            rank.send((verb, arguments))
        return self.answers(patience, verb)

    def answers(self, patience: float, verb: str) -> list[Any]:
        """Wait until all ranks have answered."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + patience
        while len(answers) < len(self._ranks):
            try:
                messages = self._ranks.messages(deadline - time.monotonic())
            except ChildError as error:
                raise MeasurementError(error.summary) from None
            for rank, message in messages:
                deadline = time.monotonic() + patience
                if message == ALIVE:
                    self._on_life()
                else:
                    answers[rank.pid] = message
            if not messages and time.monotonic() > deadline:
                raise MeasurementError(f"no rank made progress for {patience:.0f} s during {verb!r}")
        return [answers[pid] for pid in self.pids]

    def output(self) -> str:
        """The end of what each rank has written, tracebacks included."""
        lines = (f"{rank.name}: {line}" for rank in self._ranks for line in rank.log_lines())
        # Reports are published, and this folder exists on this machine only.
        return "\n".join(lines).replace(f"{Path.cwd()}/", "")

"""The rank processes on a testbed, as their parent sees them: all obey together, or the turn fails."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.testbed import Testbed

# When one rank fails its peers soon fail too: how long to listen to them before deciding who was first.
SECONDS_FOR_LAST_WORDS = 1.0
SECONDS_TO_LEAVE = 10.0
# A process that aborts has closed its pipes long before it is gone, if somebody collects core dumps.
SECONDS_TO_DIE = 10.0
# What is worth keeping of a rank's stderr.
LAST_BYTES = 8192

_PIPE = subprocess.PIPE
_WORKER = (sys.executable, "-m", "thinwire.cli.step.worker")


class TurnError(RuntimeError):
    """A turn did not come to its end. The message is one line, for the report."""


@dataclass
class _Rank:
    """A process, and what it has said so far."""

    process: subprocess.Popen[bytes]
    unread: bytearray = field(default_factory=bytearray)
    """The beginning of an answer."""
    stderr: bytearray = field(default_factory=bytearray)
    """The end of it."""
    error: tuple[float, str] | None = None
    """When it failed, and why."""
    left: bool = False
    """It has closed a pipe."""

    def last_lines(self) -> list[str]:
        """The end of stderr, without gloo's news about its connections."""
        lines = self.stderr.decode(errors="replace").splitlines()
        return [line.rstrip() for line in lines if line.strip() and not line.startswith("[Gloo]")]

    def last_word(self) -> str:
        """What a process that died may have said about it: C++ names the exception, everybody else says it last."""
        lines = self.last_lines()
        named = [line.partition("what():")[2] for line in lines if "what():" in line]
        return "".join(f": {line.strip()}" for line in (named[:1] or lines[-1:]))

    def exit_code(self) -> int | None:
        """None if it lives."""
        if not self.left:
            return self.process.poll()
        try:
            return self.process.wait(SECONDS_TO_DIE)
        except subprocess.TimeoutExpired:
            return None


class Ranks:
    """One process a rank, on all hosts of a testbed. They obey all together, or fail all together."""

    def __init__(self, testbed: Testbed, ranks_a_host: int, on_life: Callable[[], None]) -> None:
        started = testbed.start(_WORKER, ranks=ranks_a_host, stdin=_PIPE, stdout=_PIPE, stderr=_PIPE)
        self._ranks = [_Rank(process) for process in started]
        self._on_life = on_life
        self._pipes = selectors.DefaultSelector()
        for rank in self._ranks:
            assert rank.process.stdout is not None
            assert rank.process.stderr is not None
            self._pipes.register(rank.process.stdout, selectors.EVENT_READ, rank)
            self._pipes.register(rank.process.stderr, selectors.EVENT_READ, rank)

    @property
    def pids(self) -> list[int]:
        """Of the processes, in rank order."""
        return [rank.process.pid for rank in self._ranks]

    def tell(self, patience: float, **command: Any) -> list[dict[str, Any]]:
        """Have all ranks do something. Returns what each answers.

        Raises:
            TurnError: when a rank fails, dies, or when nobody shows life for `patience` seconds. The others may wait
                for it for ever: `kill()` them.
        """
        line = json.dumps(command).encode() + b"\n"
        for rank in self._ranks:
            assert rank.process.stdin is not None
            try:
                rank.process.stdin.write(line)
                rank.process.stdin.flush()
            except BrokenPipeError:
                # It has died since its last answer; `answers` finds out of what.
                break
        return self.answers(patience, str(command["do"]))

    def answers(self, patience: float, what: str) -> list[dict[str, Any]]:
        """Wait until all ranks are done."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + patience
        while len(answers) < len(self._ranks):
            if time.monotonic() > deadline:
                raise TurnError(f"no rank showed life for {patience:.0f} s during {what!r}")
            for number, answer in self._read(max(0.0, deadline - time.monotonic())):
                deadline = time.monotonic() + patience
                if answer["event"] == "alive":
                    self._on_life()
                else:
                    answers[number] = answer
            if any(rank.error is not None or rank.left for rank in self._ranks):
                raise TurnError(self._cause())
        return [answers[number] for number in range(len(self._ranks))]

    def _read(self, timeout: float) -> list[tuple[int, dict[str, Any]]]:
        """Answers that arrived meanwhile, with the ranks they are from."""
        arrived: list[tuple[int, dict[str, Any]]] = []
        for key, _ in self._pipes.select(timeout):
            rank: _Rank = key.data
            data = os.read(key.fd, 1 << 16)
            if not data:
                self._pipes.unregister(key.fileobj)
                rank.left = True
            elif key.fileobj is rank.process.stderr:
                rank.stderr += data
                del rank.stderr[:-LAST_BYTES]
            else:
                rank.unread += data
                *lines, rank.unread = rank.unread.split(b"\n")
                for line in lines:
                    answer = json.loads(line)
                    if answer["event"] == "error":
                        rank.error = (answer["at"], answer["reason"])
                    else:
                        arrived.append((self._ranks.index(rank), answer))
        return arrived

    def _cause(self) -> str:
        """What went wrong first: when one rank goes, the others fail too, with nothing but a lost connection."""
        deadline = time.monotonic() + SECONDS_FOR_LAST_WORDS
        while self._pipes.get_map() and time.monotonic() < deadline:
            self._read(max(0.0, deadline - time.monotonic()))
        for number, rank in enumerate(self._ranks):
            code = rank.exit_code()
            if code is not None and code < 0:
                return f"rank {number} was ended by {signal.Signals(-code).name}{rank.last_word()}"
        errors = [(*rank.error, number) for number, rank in enumerate(self._ranks) if rank.error is not None]
        if errors:
            _, reason, number = min(errors)
            return f"rank {number}: {reason}"
        number, rank = next((number, rank) for number, rank in enumerate(self._ranks) if rank.left)
        return f"rank {number} ended with exit code {rank.exit_code()}{rank.last_word()}"

    def last_words(self) -> str:
        """The end of what all ranks wrote to stderr, for a person who looks for the cause."""
        words = "\n".join(
            f"rank {number}: {line}" for number, rank in enumerate(self._ranks) for line in rank.last_lines()
        )
        # Reports are published, and nobody else has this folder.
        return words.replace(f"{Path.cwd()}/", "")

    def dismiss(self) -> None:
        """Let them leave by themselves."""
        for rank in self._ranks:
            assert rank.process.stdin is not None
            rank.process.stdin.close()
        for rank in self._ranks:
            try:
                rank.process.wait(SECONDS_TO_LEAVE)
            except subprocess.TimeoutExpired:
                break
        self.kill()

    def kill(self) -> None:
        """End those that are left."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            for pipe in (rank.process.stdin, rank.process.stdout, rank.process.stderr):
                assert pipe is not None
                try:
                    pipe.close()
                except BrokenPipeError:
                    # A command that it did not live to read was still in the buffer.
                    continue
        self._pipes.close()

"""Runs inputs in a process that they may end, and keeps account of what became of each."""

from __future__ import annotations

import faulthandler
import json
import logging
import mmap
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Protocol

HANG_SECONDS = 60.0
"""No input takes a hundredth of it, but machines may be busy."""
MOST_FINDINGS = 10
"""After so many a target is given up."""
_GLANCE = 0.1
_FAST = Path("/dev/shm")
MEMORY_BYTES = 8 << 30
"""What a process may ask for. More is an exception in it, and not the end of others."""


class Target(Protocol):
    """Something that takes bytes from strangers."""

    name: str
    share: float
    """Of all inputs."""
    outcomes: tuple[str, ...]
    """What may become of an input."""

    def make(self, draw: random.Random) -> bytes:
        """An input."""
        ...

    def run(self, data: bytes) -> str:
        """What becomes of it, one of `outcomes`, which depends on nothing else; raises if it is anything else."""
        ...


@dataclass(frozen=True)
class Finding:
    """An input that did what no input may do."""

    target: str
    seed: int
    number: int
    what: str
    details: str
    data: bytes

    def write(self, folder: Path) -> Path:
        """Put it into a file, from which `read` reads it."""
        path = folder / f"{self.target}-{self.seed}-{self.number}.fuzz"
        about = {"target": self.target, "seed": self.seed, "number": self.number, "what": self.what}
        path.write_bytes(json.dumps({**about, "details": self.details}).encode() + b"\n" + self.data)
        return path


def read(path: Path) -> Finding:
    """The finding in a file."""
    about, _, data = path.read_bytes().partition(b"\n")
    return Finding(**json.loads(about), data=data)


@dataclass
class Account:
    """What became of the inputs of a target."""

    target: str
    outcomes: Counter[str]
    findings: list[Finding]
    seconds: float = 0.0

    @property
    def inputs(self) -> int:
        """How many there were."""
        return self.outcomes.total() + len(self.findings)

    def add(self, other: Account) -> None:
        """Take in what became of further inputs."""
        self.outcomes += other.outcomes
        self.findings += other.findings
        self.seconds += other.seconds


def input_of(target: Target, seed: int, number: int) -> bytes:
    """The input of some number."""
    return target.make(random.Random(f"{seed}/{target.name}/{number}"))


def run_inputs(
    target: Callable[[], Target], seed: int, inputs: int, hang_seconds: float = HANG_SECONDS, *, first: int = 0
) -> Account:
    """Run so many inputs of a target, which is made in the process that runs them, but for those before `first`.

    `target` must be cheap to make: this process makes one too, to write down inputs that ended the other.
    """
    began = time.monotonic()
    maker = target()
    account = Account(maker.name, Counter(), [])
    while first < inputs and len(account.findings) < MOST_FINDINGS:
        first = _run_from(first, maker, target, seed, inputs, hang_seconds, account)
    account.seconds = time.monotonic() - began
    return account


def run_again(target: Callable[[], Target], finding: Finding, hang_seconds: float = HANG_SECONDS) -> Account:
    """Run the input of a finding, whatever made it."""

    class Again:
        def __init__(self) -> None:
            self._target = target()
            self.name, self.share, self.outcomes = self._target.name, 1.0, self._target.outcomes

        def make(self, draw: random.Random) -> bytes:
            return finding.data

        def run(self, data: bytes) -> str:
            return self._target.run(data)

    return run_inputs(Again, finding.seed, 1, hang_seconds)


def _run_from(
    first: int,
    maker: Target,
    target: Callable[[], Target],
    seed: int,
    inputs: int,
    hang_seconds: float,
    account: Account,
) -> int:
    """Run inputs until all are done, or one ends the process; the number of the next."""
    shared = mmap.mmap(-1, 8 * (1 + len(maker.outcomes)))
    numbers = memoryview(shared).cast("Q")
    numbers[0] = first
    ours, theirs = Pipe(duplex=False)
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="thinwire-fuzz-", dir=_FAST if _FAST.is_dir() else None) as folder:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer Pythons warn of threads: those here sleep, and hold nothing
            child = os.fork()
        if child == 0:
            ours.close()
            _work(target, seed, range(first, inputs), numbers, theirs, folder)
        theirs.close()
        status = _watch(child, ours, numbers, hang_seconds, account.findings.append)
    last = numbers[0]
    account.outcomes.update({outcome: numbers[1 + i] for i, outcome in enumerate(maker.outcomes) if numbers[1 + i]})
    numbers.release()
    shared.close()
    ours.close()
    if status == 0:
        return last
    what = "hangs" if status is None else _ending(status)
    account.findings.append(Finding(maker.name, seed, last, what, "", input_of(maker, seed, last)))
    return last + 1


def _watch(
    child: int,
    findings: Connection,
    numbers: memoryview,
    hang_seconds: float,
    report: Callable[[Finding], object],
) -> int | None:
    """Wait for a process; its exit code, or None if it had to be ended."""
    at, since = numbers[0], time.monotonic()
    while True:
        try:
            while findings.poll(_GLANCE):
                report(findings.recv())
        except EOFError:  # it has ended, or is about to
            _, status = os.waitpid(child, 0)
            return os.waitstatus_to_exitcode(status)
        if numbers[0] != at:
            at, since = numbers[0], time.monotonic()
        elif time.monotonic() - since > hang_seconds:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None


def _work(
    target: Callable[[], Target], seed: int, numbers: range, shared: memoryview, findings: Connection, folder: str
) -> None:
    """The other process, whose files are all in `folder`. Does not return."""
    code = 0
    try:
        os.chdir(folder)
        tempfile.tempdir = folder
        faulthandler.disable()  # of pytest: the parent says what has happened
        logging.disable()  # of steps that are skipped, thousands of them
        if "libasan" not in os.environ.get("LD_PRELOAD", ""):  # which maps terabytes for itself
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        mine = target()
        place = {outcome: 1 + i for i, outcome in enumerate(mine.outcomes)}
        found = 0
        for number in numbers:
            shared[0] = number
            data = input_of(mine, seed, number)
            try:
                shared[place[mine.run(data)]] += 1
            except Exception as error:
                what = f"raises {type(error).__name__}: {error}"
                findings.send(Finding(mine.name, seed, number, what, traceback.format_exc(), data))
                found += 1
                if found == MOST_FINDINGS:
                    break
        shared[0] = numbers.stop
    except BaseException:
        traceback.print_exc()
        code = 70
    finally:
        findings.close()
        sys.stderr.flush()
        os._exit(code)


def _ending(status: int) -> str:
    if status < 0:
        return f"ends the process by {signal.Signals(-status).name}"
    return f"ends the process with exit code {status}"

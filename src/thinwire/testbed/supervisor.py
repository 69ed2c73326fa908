"""One supervisor for all child processes: it starts them, exchanges messages, notices how they end, and leaves none.

    with Supervisor() as ranks:
        for rank in range(2):
            ranks.start(train, rank)  # train(channel, 0) and train(channel, 1), each in its own process
        while not ranks.finished:
            for child, message in ranks.messages(timeout=60.0):
                print(child.name, message)

Every command that needs processes uses it: the local ranks of `thinwire demo` and the benchmarks, the searches of
`thinwire study`, the ranks of `thinwire bench step` and `thinwire chaos` inside network namespaces, and the tests. A
child is a new interpreter, or a fork of a `ForkServer` that has imported torch already.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from thinwire.testbed.launcher import die_with
from thinwire.testbed.processes import enter_namespace
from thinwire.testbed.signals import signals_deferred

GRACE_SECONDS = 3.0
"""How long a child may take to end after SIGTERM."""
# When one child fails, its peers soon fail too. How long to wait for their errors before the first one is chosen.
SECONDS_FOR_MORE_ERRORS = 1.0
# A process that aborts has closed its connections long before it is gone, where the system collects core dumps.
SECONDS_TO_DUMP_CORE = 10.0
_LOG_BYTES = 8192


class ChildError(RuntimeError):
    """A child failed. The message names the child that failed first, and has its traceback.

    Attributes:
        summary: the same in one line.
    """

    def __init__(self, message: str, summary: str) -> None:
        super().__init__(message)
        self.summary = summary


@dataclass(frozen=True)
class Returned:
    """The function of a child returned."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """The function of a child raised. The exception itself cannot always be pickled; these texts can."""

    at: float
    """When, by `time.monotonic()`: all processes of a machine share that clock."""
    type_name: str
    message: str
    traceback: str

    @property
    def summary(self) -> str:
        """The exception in one line."""
        return f"{self.type_name}: {(self.message.strip().splitlines() or [''])[0]}"


class Process(Protocol):
    """What `Supervisor` needs of a process: a subset of `multiprocessing.Process`."""

    @property
    def pid(self) -> int | None:
        """The process id."""
        ...

    @property
    def sentinel(self) -> int:
        """A descriptor that is ready to read when the process has ended."""
        ...

    @property
    def exitcode(self) -> int | None:
        """None while it runs, -n if signal n ended it."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        ...

    def close(self) -> None:
        """Release the descriptors."""
        ...


class Starter(Protocol):
    """Forks children: a `ForkServer`."""

    def fork(self, call: Path, channel: Connection) -> Process:
        """Start a process that runs the call in this file."""
        ...


class Child:
    """A process, its channel, and what is known of its end."""

    def __init__(self, name: str, process: Process, channel: Connection, log: Path | None) -> None:
        assert process.pid is not None
        self.name, self.pid, self.log = name, process.pid, log
        self.process, self.channel = process, channel
        self.outcome: Returned | Raised | None = None
        self.exit_code: int | None = None
        """None until `Supervisor` has noticed its end; -n if signal n ended it."""
        self.ended_at = 0.0
        """When `Supervisor` noticed its end, by `time.monotonic()`."""

    @property
    def lost(self) -> bool:
        """Whether it ended without an outcome."""
        return self.exit_code is not None and self.outcome is None

    def send(self, message: Any) -> None:
        """Send a message. It is lost if the child has ended: `Supervisor` reports that."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.channel.send(message)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; does nothing if the child has ended."""
        # Until its exit code is read, the process id cannot become that of another process.
        if self.exit_code is None:
            os.kill(self.pid, number)

    def release(self) -> None:
        """Close the channel: a child that has an outcome then leaves."""
        self.channel.close()

    def log_lines(self) -> list[str]:
        """The end of its output, without gloo's messages about its connections."""
        if self.log is None or not self.log.exists():
            return []
        lines = self.log.read_bytes()[-_LOG_BYTES:].decode(errors="replace").splitlines()
        return [line.rstrip() for line in lines if line.strip() and not line.startswith("[Gloo]")]

    def last_line(self) -> str:
        """The line of its output that explains an abort: C++ names the exception, other programs print it last."""
        lines = self.log_lines()
        named = [line.partition("what():")[2] for line in lines if "what():" in line]
        return "".join(f": {line.strip()}" for line in (named[:1] or lines[-1:]))

    def _receive(self) -> list[Any]:
        """All messages that have arrived; closes the channel at its end."""
        messages: list[Any] = []
        try:
            while not self.channel.closed and self.channel.poll():
                messages.append(self.channel.recv())
        except (EOFError, ConnectionResetError):
            self.channel.close()
        except OSError as error:
            # multiprocessing raises this without a number if the child was killed in the middle of a message.
            if error.errno is not None:
                raise
            self.channel.close()
        return messages


@dataclass(frozen=True)
class Call:
    """What a child runs, and where."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    namespace: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None
    supervised: bool = True

    def run(self, channel: Connection) -> None:
        """Run it in this process. A supervised call does not return."""
        if self.log is not None:
            with open(self.log, "ab") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
        os.environ.update(self.environment)
        if self.namespace is not None:
            # Only this thread enters the namespace, and the threads that it makes.
            enter_namespace(self.namespace)
        if self.supervised:
            _run_and_report(channel, self.function, self.args)
        else:
            self.function(channel, *self.args)


class Supervisor:
    """All children of a command. No process outlives the block, however it is left.

    A child runs `function(channel, *args)`, reports what that returned or raised, and stays until it is released: its
    peers do not fail merely because it was faster, or failed first.

    Args:
        server: forks the children; None to start a new interpreter for each.
        grace: how long children may take to end after SIGTERM. With 0 they get SIGKILL at once.
    """

    def __init__(self, server: Starter | None = None, grace: float = GRACE_SECONDS) -> None:
        self._server, self._grace = server, grace
        self._started: list[Child] = []
        self._failure_settled = False

    def __enter__(self) -> Supervisor:
        # An interrupt between its creation and the block would leave the folder behind.
        with signals_deferred():
            self._folder = tempfile.TemporaryDirectory(prefix="thinwire-")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with signals_deferred():
            try:
                self.end()
            finally:
                self._folder.cleanup()

    def __iter__(self) -> Iterator[Child]:
        return iter(self._started)

    def __len__(self) -> int:
        return len(self._started)

    def __getitem__(self, number: int) -> Child:
        return self._started[number]

    @property
    def folder(self) -> Path:
        """A temporary folder that lives as long as the children."""
        return Path(self._folder.name)

    @property
    def alive(self) -> list[Child]:
        """Those that have not ended."""
        return [child for child in self if child.exit_code is None]

    @property
    def finished(self) -> bool:
        """Whether all children have returned."""
        return all(isinstance(child.outcome, Returned) for child in self)

    def start(
        self,
        function: Callable[..., Any],
        *args: Any,
        name: str | None = None,
        namespace: str | None = None,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        supervised: bool = True,
    ) -> Child:
        """Start a child.

        Args:
            function: importable by its name; gets a `Connection` to this process before its arguments.
            args: must be picklable.
            name: for errors; by default "rank n", counted from 0.
            namespace: the network namespace to run in.
            environment: added to the variables of this process.
            log: a file for stdout and stderr.
            supervised: if False, the child neither reports an outcome nor waits. It ends as any program does, by its
                exception or through the whole exit of Python. Needs a server.
        """
        call = Call(function, args, namespace, environment or {}, log, supervised)
        number = len(self._started)
        # Through a file, because a pipe holds 64 kB: this process would wait for every child in turn to import torch
        # and read the rest, and an interrupt would have to wait with it.
        path = self.folder / f"call-{number}"
        path.write_bytes(pickle.dumps(call))
        with signals_deferred():
            ours, theirs = multiprocessing.Pipe()
            with theirs:
                process = _spawn(path, theirs) if self._server is None else self._server.fork(path, theirs)
            child = Child(name or f"rank {number}", process, ours, log)
            self._started.append(child)
        return child

    def receive(self, timeout: float | None = None) -> list[tuple[Child, Any]]:
        """Wait until a message arrives or a child ends, and return the messages. Failures do not raise here."""
        channels = {child.channel: child for child in self if not child.channel.closed}
        sentinels = {child.process.sentinel: child for child in self.alive}
        if not channels and not sentinels:
            return []
        ready = connection.wait([*channels, *sentinels], None if timeout is None else max(0.0, timeout))
        messages: list[tuple[Child, Any]] = []
        for child in self:
            ended = child.exit_code is None and child.process.sentinel in ready
            # The last message of a child that has ended may still be in its channel.
            if ended or child.channel in ready:
                for message in child._receive():
                    if isinstance(message, Returned | Raised):
                        child.outcome = message
                    else:
                        messages.append((child, message))
            if ended:
                child.ended_at = time.monotonic()
                child.process.join()
                child.exit_code = child.process.exitcode
                child.process.close()
        return messages

    def messages(self, timeout: float | None = None) -> list[tuple[Child, Any]]:
        """As `receive`, for children that must all succeed.

        Raises:
            ChildError: if a child raised, or ended without an outcome.
        """
        messages = self.receive(0.0 if self._failed else timeout)
        if self._failed and not self._failure_settled:
            self._failure_settled = True
            messages += self._receive_until(SECONDS_FOR_MORE_ERRORS, lambda child: child.outcome is not None)
            messages += self._receive_until(SECONDS_TO_DUMP_CORE, lambda child: not child.channel.closed)
        # Messages first: they say how far the children were.
        if self._failed and not messages:
            raise self._first_failure()
        return messages

    @property
    def _failed(self) -> bool:
        return any(isinstance(child.outcome, Raised) or child.lost for child in self)

    def _first_failure(self) -> ChildError:
        """Name the cause. When one child goes, the others fail too, with nothing but a lost connection."""
        for child in self:
            if child.lost and child.exit_code is not None and child.exit_code < 0:
                name = signal.Signals(-child.exit_code).name
                text = f"{child.name} was ended by {name}{child.last_line()}"
                return ChildError(text, text)
        raised = [(child.outcome, child.name) for child in self if isinstance(child.outcome, Raised)]
        if raised:
            error, name = min(raised, key=lambda each: each[0].at)
            return ChildError(f"{name} failed:\n{error.traceback}", f"{name}: {error.summary}")
        child = next(child for child in self if child.lost)
        text = f"{child.name} ended with exit code {child.exit_code}{child.last_line()}"
        return ChildError(text, text)

    def _receive_until(self, seconds: float, settled: Callable[[Child], bool]) -> list[tuple[Child, Any]]:
        messages: list[tuple[Child, Any]] = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(map(settled, self.alive)):
            messages += self.receive(deadline - time.monotonic())
        return messages

    def end(self) -> None:
        """End all children and wait for them: release those that have an outcome, SIGTERM for others, then SIGKILL."""
        for child in self.alive:
            child.release()
            if child.outcome is None:
                child.signal(signal.SIGTERM if self._grace else signal.SIGKILL)
        deadline = time.monotonic() + self._grace
        for child in self.alive:
            child.process.join(max(0.0, deadline - time.monotonic()))
            if child.process.exitcode is None:
                child.signal(signal.SIGKILL)
                child.process.join()
            child.ended_at = time.monotonic()
            child.exit_code = child.process.exitcode
            child.process.close()
        for child in self:
            child.release()


def _spawn(call: Path, channel: Connection) -> Process:
    process = multiprocessing.get_context("spawn").Process(target=_spawned, args=(call, channel, os.getpid()))
    with _interrupts_blocked():
        process.start()
    return process


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Start child processes in this block: they never see Ctrl-C, and an interrupt of this process waits for its end.

    A terminal sends SIGINT to all processes of a command. The parent ends its children anyway. A child that handled the
    signal itself would print a traceback, or exit through Python's finalization while threads of torch still run,
    which aborts it. A blocked signal stays blocked in a new process from its first instruction on; a handler that the
    child installs would come too late.
    """
    with signals_deferred():
        # When it starts its helper process, multiprocessing unblocks SIGINT: so that has to happen before.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _spawned(call: Path, channel: Connection, parent: int) -> None:
    """Run in a new interpreter."""
    if sys.platform == "linux":
        die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_call(call, channel)


def run_call(call: Path, channel: Connection) -> None:
    """Run in a child: do what the file says."""
    loaded: Call = pickle.loads(call.read_bytes())
    loaded.run(channel)


def _run_and_report(channel: Connection, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Call the function, report its outcome, and leave without Python's finalization.

    gloo's threads give the tensors of a collective back to Python some time after it is complete; one that does so
    while the interpreter exits takes the process down with SIGABRT (torch 2.13).
    """
    code = 1
    try:
        outcome = _outcome(channel, function, args)
        # The parent may end this process as soon as it has the outcome.
        sys.stdout.flush()
        sys.stderr.flush()
        # If the parent has closed the channel, it ends this process and reads no outcome.
        with suppress(BrokenPipeError, ConnectionResetError, EOFError):
            channel.send(outcome)
            while True:
                # Messages that the function did not read; the end of the channel releases this process.
                channel.recv()
        code = 1 if isinstance(outcome, Raised) else 0
    finally:
        os._exit(code)


def _outcome(channel: Connection, function: Callable[..., Any], args: Sequence[Any]) -> Returned | Raised:
    try:
        return Returned(function(channel, *args))
    except BaseException as error:  # whatever ended the function is what the parent reports
        trace = traceback.format_exc().encode(errors="backslashreplace").decode()
        message = str(error).encode(errors="backslashreplace").decode()
        return Raised(time.monotonic(), type(error).__name__, message, trace)

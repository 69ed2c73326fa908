"""A process that has imported what its children need, and forks them: a child costs milliseconds, not seconds.

`python -m thinwire.testbed.forkserver <descriptor>` with a socket to its parent. Not the fork server of
multiprocessing: the children of that one always leave by os._exit, and some of ours must end as any program does,
through the whole exit of Python. Children stay zombies until the parent asks for their exit codes, so that their
process ids cannot become those of other processes before.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from thinwire.testbed.launcher import die_with
from thinwire.testbed.signals import signals_deferred
from thinwire.testbed.supervisor import run_call

SECONDS_TO_IMPORT = 300.0
SECONDS_TO_LEAVE = 10.0
_MESSAGE_BYTES = 1 << 16
_ENVIRONMENT = {
    # Children share the cores, and a process that forks should have no threads.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    # Fork copies the page tables. Large pages have few entries there: a child takes a third of the time to start. Only
    # glibc's malloc can use them, and Python's objects are most of the memory.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "PYTHONMALLOC": "malloc",
}


class ForkServer:
    """The parent's side. A fork server lives as long as the block, and its children do not outlive it.

    Args:
        preload: modules to import before the first fork.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self._preload = list(preload)
        self._undo = ExitStack()

    def __enter__(self) -> ForkServer:
        with signals_deferred(), ExitStack() as undo:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._control = undo.enter_context(ours)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    # Ctrl-C in a terminal is for the parent.
                    start_new_session=True,
                    env={**os.environ, **_ENVIRONMENT},
                )
            undo.callback(self._end, process)
            self._send({"path": sys.path, "preload": self._preload})
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with signals_deferred():
            self._undo.close()

    def wait(self) -> None:
        """Return when it is ready to fork. Call this once, before the first fork."""
        self._control.settimeout(SECONDS_TO_IMPORT)
        self._answer()

    def fork(self, call: Path, channel: Connection) -> ForkedProcess:
        """Start a child that runs the call in this file and has the other end of the channel."""
        message = json.dumps({"call": str(call)}).encode()
        socket.send_fds(self._control, [message], [channel.fileno()])
        return ForkedProcess(self, self._answer()["pid"])

    def reap(self, pid: int) -> int:
        """The exit code of a child that has ended. Afterwards its process id is free."""
        self._send({"reap": pid})
        return self._answer()["code"]

    def _send(self, message: dict[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())

    def _answer(self) -> dict[str, Any]:
        message = self._control.recv(_MESSAGE_BYTES)
        if not message:
            raise RuntimeError("the fork server has ended; its stderr has the reason")
        return json.loads(message)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        # Children that are left die with it.
        self._control.close()
        try:
            process.wait(SECONDS_TO_LEAVE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class ForkedProcess:
    """A child of a fork server, with the methods of `multiprocessing.Process` that a `Supervisor` uses."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.sentinel = os.pidfd_open(pid)
        self._exit_code: int | None = None

    @property
    def exitcode(self) -> int | None:
        """None while it runs, -n if signal n ended it."""
        self.join(0.0)
        return self._exit_code

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        if self._exit_code is None and wait([self.sentinel], timeout):
            self._exit_code = self._server.reap(self.pid)

    def close(self) -> None:
        """Release the descriptor."""
        os.close(self.sentinel)


# The server's side ---------------------------------------------------------------------------------------------------


def _serve(control: socket.socket) -> tuple[Path, Connection] | None:
    """In the server: None when the parent is gone. In a child: what it runs."""
    server = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 1)
        if not message:
            return None
        request = json.loads(message)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            control.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())
            continue
        (descriptor,) = descriptors
        pid = os.fork()
        if pid == 0:
            die_with(server)
            control.close()
            return Path(request["call"]), Connection(descriptor)
        os.close(descriptor)
        control.send(json.dumps({"pid": pid}).encode())


def main() -> None:
    """Import, then serve until the parent is gone. Children return from `_serve` too, and leave through the end."""
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(control.recv(_MESSAGE_BYTES))
    sys.path[:] = settings["path"]
    gc.disable()  # importing makes much and drops little
    for module in settings["preload"]:
        importlib.import_module(module)
    gc.enable()
    # At its exit each child would copy and traverse what all have in common, for a second of a core that others need.
    gc.collect()
    gc.freeze()
    control.send(b"{}")
    work = _serve(control)
    if work is not None:
        run_call(*work)


if __name__ == "__main__":
    main()

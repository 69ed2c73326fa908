"""Local worker processes: start them, hear from the first one, and leave none behind."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, get_context, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as torch_mp

from thinwire.testbed.launcher import die_with
from thinwire.testbed.signals import signals_deferred

# How long the others may take to notice that a worker is gone, before they are ended too.
GRACE_SECONDS = 3.0
# Files in the folder that parent and workers share.
_WORK, _TRACEBACK, _UNFINISHED = "work", "traceback-", "unfinished-"

Report = Callable[[Any], None]


class WorkerError(RuntimeError):
    """A worker ended early; the message says which, and carries its traceback."""


@contextmanager
def children_ignore_interrupts() -> Iterator[None]:
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


def run_workers(work: Callable[..., None], ranks: int, args: tuple[Any, ...], on_message: Report) -> None:
    """Run ``work(report, *args)`` in ``ranks`` new processes that share a gloo process group.

    What rank 0 passes to ``report`` arrives at ``on_message`` in this process; from other ranks it goes nowhere.
    Returns when all have returned. Whatever else ends this call (a worker's exception, Ctrl-C), no process outlives it.
    """
    inbox, outbox = get_context("spawn").Pipe(duplex=False)
    with inbox, outbox, _temporary_folder() as folder:
        # Through a file, because a pipe holds 64 kB: start() would wait for every worker in turn to import torch and
        # read the rest, and an interrupt would have to wait with it.
        (folder / _WORK).write_bytes(pickle.dumps((work, args)))
        workers: torch_mp.ProcessContext | None = None
        try:
            with children_ignore_interrupts():
                # Daemonic, so that none is left behind when one of them cannot be started.
                workers = torch_mp.spawn(
                    _worker_main, args=(ranks, folder, outbox, os.getpid()), nprocs=ranks, join=False, daemon=True
                )
            assert workers is not None  # with join=False spawn() returns at once, and never None
            outbox.close()
            _listen(workers, inbox, folder, on_message)
        finally:
            if workers is not None:
                with signals_deferred():
                    end_processes(workers.processes)


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """An interrupt between its creation and the block would leave it behind."""
    with signals_deferred():
        folder = tempfile.TemporaryDirectory(prefix="thinwire-")
    try:
        yield Path(folder.name)
    finally:
        with signals_deferred():
            folder.cleanup()


def _listen(workers: torch_mp.ProcessContext, inbox: connection.Connection, folder: Path, on_message: Report) -> None:
    inbox_open = True
    finished = False
    while not finished:
        connection.wait([*workers.sentinels, *([inbox] if inbox_open else [])])
        try:
            while inbox_open and inbox.poll():
                on_message(inbox.recv())
        except EOFError:
            inbox_open = False
        try:
            finished = workers.join(timeout=0, grace_period=GRACE_SECONDS)
        except (torch_mp.ProcessRaisedException, torch_mp.ProcessExitedException) as error:
            raise WorkerError(_root_cause(workers, folder) or str(error).strip()) from None


def _root_cause(workers: torch_mp.ProcessContext, folder: Path) -> str | None:
    """Say what happened first: when one worker goes, the others fail too, with nothing but "connection closed"."""
    for rank, process in enumerate(workers.processes):
        code = process.exitcode
        if code is not None and code < 0 and code != -signal.SIGTERM:  # SIGTERM is how the survivors were ended
            return f"worker {rank} was ended by {signal.Signals(-code).name}"
    files = {rank: folder / f"{_TRACEBACK}{rank}" for rank in range(len(workers.processes))}
    tracebacks = {rank: path for rank, path in files.items() if path.exists()}
    if not tracebacks:
        return None
    rank = min(tracebacks, key=lambda rank: tracebacks[rank].stat().st_mtime_ns)
    return f"worker {rank} failed:\n{tracebacks[rank].read_text(encoding='utf-8')}"


def end_processes(processes: Sequence[BaseProcess]) -> None:
    """End them by SIGTERM, or by SIGKILL those that do not end within ``GRACE_SECONDS``, and wait for all."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(GRACE_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()


def _worker_main(rank: int, ranks: int, folder: Path, outbox: connection.Connection, parent: int) -> None:
    """Work, and leave without Python's finalization.

    gloo's threads give the tensors of a collective back to Python some time after it is complete; one that does so
    while the interpreter exits takes the process down with SIGABRT (torch 2.13).
    """
    if sys.platform == "linux":
        # torch has asked for SIGINT when the parent dies, and that is blocked here.
        die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = 1
    try:
        _work_in_group(rank, ranks, folder, outbox)
        code = 0
    except BaseException:
        # Written under another name first: a reader that finds the file finds all of it.
        unfinished = folder / f"{_UNFINISHED}{rank}"
        unfinished.write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
        unfinished.rename(folder / f"{_TRACEBACK}{rank}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _work_in_group(rank: int, ranks: int, folder: Path, outbox: connection.Connection) -> None:
    work, args = pickle.loads((folder / _WORK).read_bytes())
    # One core each: workers that spread over all cores would only fight each other.
    torch.set_num_threads(1)
    # gloo otherwise looks up the host's name, which may lead to a real network, or nowhere.
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    rendezvous = folder / "rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=ranks)
    if rank > 0:
        outbox.close()
    work(outbox.send if rank == 0 else _to_nobody, *args)
    dist.destroy_process_group()


def _to_nobody(message: object) -> None:
    """The ``report`` of every rank but the first."""

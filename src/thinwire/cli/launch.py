"""Local worker processes: start them, hear from the first one, and leave none behind."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as torch_mp

# How long the others may take to notice that a worker is gone, before they are ended too.
GRACE_SECONDS = 3.0
SECONDS_FOR_GLOO = 0.5

Report = Callable[[Any], None]


class WorkerError(RuntimeError):
    """A worker ended early; the message says which, and carries its traceback."""


def run_workers(work: Callable[..., None], ranks: int, args: tuple[Any, ...], on_message: Report) -> None:
    """Run ``work(report, *args)`` in ``ranks`` new processes that share a gloo process group.

    What rank 0 passes to ``report`` arrives at ``on_message`` in this process; from other ranks it goes nowhere.
    Returns when all have returned. Whatever else ends this call (a worker's exception, Ctrl-C), no process outlives it.
    """
    inbox, outbox = get_context("spawn").Pipe(duplex=False)
    with inbox, tempfile.TemporaryDirectory(prefix="thinwire-") as folder:
        with outbox:
            # Daemonic, so that an interrupt halfway through the starting leaves none behind either.
            workers = torch_mp.spawn(
                _worker_main,
                args=(ranks, Path(folder, "rendezvous"), outbox, work, args),
                nprocs=ranks,
                join=False,
                daemon=True,
            )
        assert workers is not None  # with join=False spawn() returns at once, and never None
        try:
            _listen(workers, inbox, on_message)
        finally:
            _end(workers)


def _listen(workers: torch_mp.ProcessContext, inbox: connection.Connection, on_message: Report) -> None:
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
            raise WorkerError(_root_cause(workers) or str(error).strip()) from None


def _root_cause(workers: torch_mp.ProcessContext) -> str | None:
    """Say what happened first: when one worker goes, the others fail too, with nothing but "connection closed"."""
    for rank, process in enumerate(workers.processes):
        code = process.exitcode
        if code is not None and code < 0 and code != -signal.SIGTERM:  # SIGTERM is how the survivors were ended
            return f"worker {rank} was ended by {signal.Signals(-code).name}"
    tracebacks = _traceback_files(workers)
    if not tracebacks:
        return None
    rank = min(tracebacks, key=lambda rank: tracebacks[rank].stat().st_mtime_ns)
    return f"worker {rank} failed:\n{pickle.loads(tracebacks[rank].read_bytes())}"


def _traceback_files(workers: torch_mp.ProcessContext) -> dict[int, Path]:
    """Where torch's launcher left the tracebacks of the ranks that raised."""
    files = {rank: Path(name) for rank, name in enumerate(workers.error_files)}
    return {rank: path for rank, path in files.items() if path.exists()}


def _end(workers: torch_mp.ProcessContext) -> None:
    for process in workers.processes:
        process.terminate()
    for process in workers.processes:
        process.join(GRACE_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
    for path in _traceback_files(workers).values():
        path.unlink()


def _worker_main(
    rank: int, ranks: int, rendezvous: Path, outbox: connection.Connection, work: Callable[..., None], args: tuple
) -> None:
    # gloo's threads give the tensors of a collective back to Python some time after it is complete; one that does so
    # while the interpreter exits takes the process down with SIGABRT (torch 2.13). Leave them the time.
    atexit.register(time.sleep, SECONDS_FOR_GLOO)
    # One core each: workers that spread over all cores would only fight each other.
    torch.set_num_threads(1)
    # gloo otherwise looks up the host's name, which may lead to a real network, or nowhere.
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    dist.init_process_group("gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=ranks)
    if rank > 0:
        outbox.close()
    work(outbox.send if rank == 0 else _to_nobody, *args)
    dist.destroy_process_group()


def _to_nobody(message: object) -> None:
    """The ``report`` of every rank but the first."""

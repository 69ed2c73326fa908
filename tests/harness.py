"""Real processes with a real gloo group, for a test to run a function in.

    results = run_ranks(function, 4, argument)      # [function(0, 4, argument), ..., function(3, 4, argument)]

A fork server that has imported torch and thinwire once makes a process cost milliseconds. Ranks find each other through
a file in a temporary directory and talk over loopback, so there is no port to collide on. Warnings are errors in ranks
as they are in the test process. A rank keeps its process group until every rank has reported: none sees a closed
connection because another was faster.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

CLONE_NEWNET = 0x40000000
GRACE_SECONDS = 5.0
"""How long the others may take to finish once one rank has failed: they often wait for a peer that will not come."""

_processes = multiprocessing.get_context("forkserver")
# What ranks would otherwise import each for itself. Making any torch optimizer imports torch._dynamo, which takes over
# a second; the oracles, which come with their cases, are long to compile where bytecode is not written.
_processes.set_forkserver_preload(
    [
        *("numpy", "pytest", "torch.nn.parallel", "torch._dynamo", "torch.distributed.checkpoint.state_dict"),
        *("thinwire.cli.app", "tests.distributed.common", "tests.distributed.oracle_cases"),
    ]
)


@dataclass(frozen=True)
class Raised:
    """What a rank raised: the exception itself cannot always cross a process boundary, its text can."""

    type_name: str
    message: str
    traceback: str


class FailedRanksError(AssertionError):
    """At least one rank raised, died or did not finish."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, network: int | None = None
) -> list[Any]:
    """Every rank's result in rank order. Raises `FailedRanksError` with the tracebacks if any rank did not return.

    Tensors come back as NumPy arrays. `network` is the pid of a process whose network namespace the ranks enter.
    """
    outcomes = _run(function, world_size, args, timeout, network, patience=GRACE_SECONDS)
    failures = [f"rank {rank}:\n{o.traceback}" for rank, o in enumerate(outcomes) if isinstance(o, Raised)]
    if failures:
        raise FailedRanksError("\n".join(failures))
    return outcomes


def run_ranks_expecting_errors(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0
) -> list[Raised]:
    """Every rank's exception in rank order. Raises `FailedRanksError` if any rank returned instead."""
    outcomes = _run(function, world_size, args, timeout, network=None, patience=timeout)
    returned = [rank for rank, outcome in enumerate(outcomes) if not isinstance(outcome, Raised)]
    if returned:
        raised = [f"rank {r}:\n{o.traceback}" for r, o in enumerate(outcomes) if isinstance(o, Raised)]
        raise FailedRanksError("\n".join([f"ranks {returned} returned, an exception was due on all", *raised]))
    return outcomes


def _run(
    function: Callable[..., Any],
    world_size: int,
    args: Sequence[Any],
    timeout: float,
    network: int | None,
    patience: float,
) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="thinwire-ranks-") as directory:
        connections, processes = [], []
        for rank in range(world_size):
            ours, theirs = _processes.Pipe()
            store = os.path.join(directory, "store")
            process = _processes.Process(
                target=_rank_main,
                args=(theirs, function, rank, world_size, args, store, timeout, network),
                name=f"rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            connections.append(ours)
            processes.append(process)
        try:
            outcomes = _collect(connections, timeout, patience)
            for rank in outcomes:
                _release(connections[rank])
            for rank in outcomes:
                processes[rank].join(GRACE_SECONDS)
        finally:
            for process, connection in zip(processes, connections, strict=True):
                connection.close()
                if process.is_alive():
                    process.kill()
                process.join()
                process.close()
    silent = [rank for rank in range(world_size) if rank not in outcomes]
    message = f"ranks {silent} had not finished"
    return [outcomes.get(rank, Raised("TimeoutError", message, message)) for rank in range(world_size)]


def _collect(connections: Sequence[Connection], timeout: float, patience: float) -> dict[int, Any]:
    """The outcomes by rank, without those of ranks that are still silent at the deadline."""
    outcomes: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while pending := {c: rank for rank, c in enumerate(connections) if rank not in outcomes}:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for c in ready:
            assert isinstance(c, Connection)
            try:
                outcome = c.recv()
            except EOFError:
                message = "the process died without an outcome"
                outcome = Raised("ProcessDied", message, message)
            outcomes[pending[c]] = outcome
            if isinstance(outcome, Raised):
                deadline = min(deadline, time.monotonic() + patience)
    return outcomes


def _release(connection: Connection) -> None:
    try:
        connection.send("everyone has reported")
    except BrokenPipeError:
        return  # The rank died; its outcome already says so.


def _rank_main(
    connection: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    args: Sequence[Any],
    store_path: str,
    timeout: float,
    network: int | None,
) -> None:
    if network is not None:
        _enter_network(network)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store_path, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        outcome = plain(function(rank, world_size, *args))
    except BaseException as error:  # whatever ended this rank is what the test wants to read
        outcome = Raised(type(error).__name__, str(error), traceback.format_exc())
    connection.send(outcome)
    connection.recv()
    if dist.is_initialized():
        dist.destroy_process_group()


def plain(value: Any) -> Any:
    """`value` with every tensor turned into a NumPy array; bfloat16, which NumPy lacks, becomes float32 exactly."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(v) for v in value)
    return value


# A network of one's own ----------------------------------------------------------------------------------------------


def _call_libc(name: str, *args: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        raise OSError(ctypes.get_errno(), f"{name}{args}: {os.strerror(ctypes.get_errno())}")


def _enter_network(pid: int) -> None:
    """Only the calling thread moves, and threads made later follow it: so this comes before any other thread."""
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        _call_libc("setns", descriptor, CLONE_NEWNET)
    finally:
        os.close(descriptor)


def _hold_network(connection: Connection) -> None:
    try:
        _call_libc("unshare", CLONE_NEWNET)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        connection.send(f"no private network namespace: {error}")
        return
    connection.send(os.getpid())
    connection.recv()


class NoPrivateNetworkError(RuntimeError):
    """This user may not make a network namespace (it takes root, and `ip`)."""


@contextmanager
def private_network() -> Iterator[int]:
    """The pid of a process that holds a fresh network namespace with nothing but loopback in it.

    What ranks send there is all that its interface counts: no other traffic of the machine is in the figures.
    """
    ours, theirs = _processes.Pipe()
    holder = _processes.Process(target=_hold_network, args=(theirs,), name="network-holder", daemon=True)
    holder.start()
    theirs.close()
    try:
        answer = ours.recv()
        if isinstance(answer, str):
            raise NoPrivateNetworkError(answer)
        yield answer
    finally:
        if holder.is_alive():
            holder.kill()
        holder.join()
        holder.close()
        ours.close()


def loopback_bytes_sent() -> int:
    """What the loopback interface of this process's network namespace has sent, TCP headers and all."""
    with open("/proc/self/net/dev") as devices:
        for line in devices:
            name, _, figures = line.partition(":")
            if name.strip() == "lo":
                return int(figures.split()[8])
    raise RuntimeError("/proc/self/net/dev lists no loopback interface")

"""Real processes with a real gloo group, for a test to run a function in.

    results = run_ranks(function, 4, argument)      # [function(0, 4, argument), ..., function(3, 4, argument)]

A fork server that has imported torch and thinwire once makes a process cost milliseconds. Ranks find each other through
a file in a temporary directory and talk over loopback, so there is no port to collide on. Warnings are errors in ranks
as they are in the test process. A rank keeps its process group until every rank has reported: none sees a closed
connection because another was faster.
"""

from __future__ import annotations

import atexit
import functools
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from thinwire._torch_compat import IMPORTED_BY_OPTIMIZERS
from thinwire.testbed import Testbed
from thinwire.testbed.forkserver import ForkServer
from thinwire.testbed.supervisor import Child, Raised, Returned, Supervisor

GRACE_SECONDS = 5.0
"""How long the others may take to finish once one rank has failed: they often wait for a peer that will not come."""

# What ranks would otherwise import each for itself. Making any torch optimizer imports torch._dynamo, which takes over
# a second; the oracles, which come with their cases, are long to compile where bytecode is not written.
PRELOAD = (
    *("numpy", "pytest", "torch.nn.parallel", IMPORTED_BY_OPTIMIZERS, "torch.distributed.checkpoint.state_dict"),
    *("thinwire.cli.app", "tests.distributed.common", "tests.distributed.oracle_cases"),
)


@functools.cache
def fork_server(*more: str) -> ForkServer:
    """The one fork server of this test process that has imported `more` besides what all ranks need."""
    server = ForkServer([*PRELOAD, *more]).__enter__()
    atexit.register(server.__exit__)
    server.wait()
    return server


class FailedRanksError(AssertionError):
    """At least one rank raised, died or did not finish."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    network: str | None = None,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Every rank's result in rank order. Raises `FailedRanksError` with the tracebacks if any rank did not return.

    Tensors come back as NumPy arrays. `network` is the network namespace that the ranks enter. `preload` names modules
    that take long to import: a fork server of its own imports them once.
    """
    outcomes = _run(function, world_size, args, timeout, network, GRACE_SECONDS, fork_server(*preload))
    failures = [f"rank {rank}:\n{o.traceback}" for rank, o in enumerate(outcomes) if isinstance(o, Raised)]
    if failures:
        raise FailedRanksError("\n".join(failures))
    return [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]


def run_ranks_expecting_errors(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0
) -> list[Raised]:
    """Every rank's exception in rank order. Raises `FailedRanksError` if any rank returned instead."""
    outcomes = _run(function, world_size, args, timeout, None, timeout, fork_server())
    raised = [outcome for outcome in outcomes if isinstance(outcome, Raised)]
    if len(raised) < world_size:
        returned = [rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, Returned)]
        tracebacks = [error.traceback for error in raised]
        raise FailedRanksError("\n".join([f"ranks {returned} returned, an exception was due on all", *tracebacks]))
    return raised


def _run(
    function: Callable[..., Any],
    world_size: int,
    args: Sequence[Any],
    timeout: float,
    network: str | None,
    patience: float,
    server: ForkServer,
) -> list[Returned | Raised]:
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    with Supervisor(server, grace=0.0) as ranks:
        store = str(ranks.folder / "store")
        for rank in range(world_size):
            call = (function, rank, world_size, tuple(args), store, timeout)
            ranks.start(_rank_main, *call, namespace=network, environment=environment)
        deadline, failed = time.monotonic() + timeout, False
        while not all(rank.outcome or rank.lost for rank in ranks) and time.monotonic() < deadline:
            ranks.receive(deadline - time.monotonic())
            if not failed and any(rank.lost or isinstance(rank.outcome, Raised) for rank in ranks):
                failed, deadline = True, min(deadline, time.monotonic() + patience)
        silent = [number for number, rank in enumerate(ranks) if rank.outcome is None and not rank.lost]
        died, late = "the process died without an outcome", f"ranks {silent} had not finished"
        return [
            rank.outcome or (_failure("ProcessDied", died) if rank.lost else _failure("TimeoutError", late))
            for rank in ranks
        ]


@contextmanager
def forked(function: Callable[..., Any], *args: Any) -> Iterator[Child]:
    """A process that runs `function(channel, *args)` without a process group. It is killed when the block is left."""
    with Supervisor(fork_server(), grace=0.0) as children:
        child = children.start(function, *args, supervised=False)
        try:
            yield child
        finally:
            child.signal(signal.SIGKILL)


def wait_for_end(child: Child, seconds: float = 60.0) -> bool:
    """Whether a process of `forked` ends by itself, or of a signal, within so many seconds."""
    return bool(connection.wait([child.process.sentinel], seconds))


def _failure(type_name: str, message: str) -> Raised:
    return Raised(time.monotonic(), type_name, message, message)


def _rank_main(
    channel: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    args: Sequence[Any],
    store: str,
    timeout: float,
) -> Any:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # Many tests give all ranks the same gradients. tests/distributed/test_first_gradients.py is about the warning.
    warnings.filterwarnings("ignore", message="all ranks have the same gradients")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    return plain(function(rank, world_size, *args))


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


@contextmanager
def private_network() -> Iterator[str]:
    """A network namespace in which nothing but loopback is used. Raises `TestbedUnavailable` where there can be none.

    What ranks send there is all that its interface counts: no other traffic of the machine is in the figures.
    """
    with Testbed(1) as testbed:
        yield testbed.hosts[0].namespace


def loopback_bytes_sent() -> int:
    """What the loopback interface of this process's network namespace has sent, TCP headers and all."""
    with open("/proc/self/net/dev") as devices:
        for line in devices:
            name, _, figures = line.partition(":")
            if name.strip() == "lo":
                return int(figures.split()[8])
    raise RuntimeError("/proc/self/net/dev lists no loopback interface")

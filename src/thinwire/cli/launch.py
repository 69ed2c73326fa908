"""Ranks on this machine that share a gloo process group, over loopback or on the hosts of a testbed."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.testbed import Testbed
from thinwire.testbed.supervisor import Returned, Supervisor

Report = Callable[[Any], None]
"""What a rank calls to send a message to the command. Only messages of rank 0 arrive."""


def run_local_ranks(
    work: Callable[..., Any],
    ranks: int,
    args: tuple[Any, ...],
    on_message: Callable[[Any], None],
    testbed: Testbed | None = None,
) -> Any:
    """Run ``work(report, *args)`` in ``ranks`` new processes that share a gloo process group.

    They talk over loopback, or, with a testbed of as many hosts, each from a host of its own.

    What rank 0 passes to ``report`` arrives at ``on_message`` in this process; messages of other ranks are dropped.
    However this call ends, no process outlives it.

    Returns:
        What rank 0 has returned, when all ranks have.

    Raises:
        ChildError: when a rank fails; the message names the first one and has its traceback.
    """
    with local_ranks(work, ranks, args, testbed) as group:
        while not group.finished:
            for _, message in group.messages():
                on_message(message)
        assert isinstance(group[0].outcome, Returned)
        return group[0].outcome.value


@contextmanager
def local_ranks(
    work: Callable[..., Any], ranks: int, args: tuple[Any, ...], testbed: Testbed | None = None
) -> Iterator[Supervisor]:
    """As `run_local_ranks`, for callers that receive the messages themselves."""
    places = [(None, {})] * ranks
    if testbed is not None:
        places = [(host.namespace, environment) for host, environment in testbed.places()]
        if len(places) != ranks:
            raise ValueError(f"ranks must be {len(places)}, one per host of the testbed, got {ranks}")
    with Supervisor() as group:
        for rank, (namespace, environment) in enumerate(places):
            group.start(
                *(_work_in_group, rank, ranks, group.folder / "rendezvous", work, args),
                namespace=namespace,
                environment=environment,
            )
        yield group


def _work_in_group(
    channel: Connection, rank: int, ranks: int, rendezvous: Path, work: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    # One core each: ranks that spread over all cores would slow each other down.
    torch.set_num_threads(1)
    # gloo otherwise looks up the host's name, which may lead to a real network, or nowhere. On a host of a testbed the
    # variable is set.
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    dist.init_process_group("gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=ranks)
    result = work(channel.send if rank == 0 else _drop, *args)
    dist.destroy_process_group()
    return result if rank == 0 else None


def _drop(message: object) -> None:
    """The ``report`` of every rank but the first."""

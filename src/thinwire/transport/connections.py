"""Private process groups. Nothing else uses them, so their messages cannot mix with those of the user.

They are not made by `torch.distributed.new_group`, which names a group of some ranks by the number of existing groups.
Ranks that have made or destroyed different numbers of groups, which garbage collection does at any time, would wait for
each other under different names. And a group that gets the name of a destroyed one would find the old addresses in the
store. The groups here have a name that all members have agreed on and that is never used again. They are in no registry
and end with the last reference to them, which a `Connection` holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup, Store

from thinwire._torch_compat import backends, connect_group
from thinwire.transport.memory import HOST

DESCRIPTION = "thinwire"
"""Marks these groups in torch's logs and for tools that count bytes."""
_SHORT_TIMEOUT = timedelta(milliseconds=1)
_UNUSED_TAG = (1 << 31) - 1


class Connection:
    """A process group that can be closed. Senders and receivers hold the connection, so closing it ends the group.

    Args:
        group: used by nothing else.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group: ProcessGroup | None = group
        self._shut_down = weakref.finalize(self, _shut_down, group)
        self._shut_down.atexit = False

    @property
    def group(self) -> ProcessGroup:
        """The group.

        Raises:
            RuntimeError: the connection is closed.
        """
        if self._group is None:
            raise RuntimeError("the connection to other ranks is closed")
        return self._group

    def abort(self) -> None:
        """End all waits in the group, on all its members."""
        group = self._group
        if group is not None:
            abort_group(group)

    def close(self) -> None:
        """Drop the group. It ends when its last message is complete."""
        self._group = None
        self._shut_down()


@dataclass(frozen=True)
class Connections:
    """The connections of one rank."""

    slice: Connection | None
    """To the ranks that work on the same slice in other nodes; None if there is one worker."""
    node: Connection | None
    """To the other ranks of the node; None in a flat topology."""

    @property
    def all(self) -> list[Connection]:
        """Those that exist."""
        return [each for each in (self.slice, self.node) if each is not None]

    def close(self) -> None:
        """Close all of them."""
        for connection in self.all:
            connection.close()


def _shut_down(group: ProcessGroup) -> None:
    """Destroy NCCL communicators, which do not end with the last reference to their group."""
    for backend in backends(group).values():
        if backend.name() == "nccl":
            backend.shutdown()


def abort_group(group: ProcessGroup) -> None:
    """Make all waits in a group fail at once, here and, because connections close, on its other members."""
    served = backends(group)
    for backend in served.values():
        if backend.name() in ("nccl", "virtual"):
            backend.abort()  # may leave incomplete data in a receive buffer; checksums detect that
    if HOST.type not in served:
        return
    for member in range(group.size()):
        if member != group.rank():
            # gloo has no abort(). But a wait that times out closes all connections of its group.
            with suppress(RuntimeError):
                work = group.recv([torch.empty(1, dtype=torch.uint8, device=HOST)], member, _UNUSED_TAG)
                assert work is not None, "this rank is a member of the group"
                work.wait(_SHORT_TIMEOUT)


def private_group(
    ranks: Sequence[int],
    own: int,
    name: str,
    backend: str,
    device: torch.device,
    timeout: timedelta | None,
    store: Store | None = None,
) -> ProcessGroup:
    """Connect some ranks. All of them call this at the same time.

    Args:
        ranks: the members' ranks in the default group, or in the run that has the store.
        own: the position of this rank among them.
        name: equal on all members, and never used before.
        backend: "gloo" or "nccl".
        device: the kind of device that the group serves.
        timeout: how long members wait for each other; None for the backend's default.
        store: in which they find each other; None for that of the default group.
    """
    group = connect_group(f"thinwire/{name}/", ranks, own, backend, device, timeout, DESCRIPTION, store)
    if backend == "gloo":
        # A member that closes its connections right away must not do so while another still connects.
        group.barrier().wait()
    return group

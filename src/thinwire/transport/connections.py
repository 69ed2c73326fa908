"""Process groups that nobody else knows of, so that their messages cannot mix with those of others.

They are made without `torch.distributed.new_group`. That function names a group of some ranks by how many groups there
are: ranks that have made or destroyed another number of groups, which garbage collection does at its own time, would
wait for each other under different names, and a group that takes the name of one that was destroyed would find the old
addresses in the store. These groups have a name that all members have agreed on and that is never used again, are in no
registry, and end with the last reference to them. A `Connection` holds that reference.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup

from thinwire._torch_compat import backends, connect_group

DESCRIPTION = "thinwire"
"""Of our groups, in torch's logs and for those who count bytes."""


class Connection:
    """A process group until it is closed. Senders and receivers hold this, not the group, so closing it ends the group.

    Args:
        group: nothing else uses it.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group: ProcessGroup | None = group
        self._shut_down = weakref.finalize(self, _shut_down, group)
        self._shut_down.atexit = False

    @property
    def group(self) -> ProcessGroup:
        """The group.

        Raises:
            RuntimeError: when it is closed.
        """
        if self._group is None:
            raise RuntimeError("the connection to other ranks is closed")
        return self._group

    @property
    def current(self) -> ProcessGroup | None:
        """The group; None when it is closed."""
        return self._group

    def close(self) -> None:
        """Let go of the group, which ends when no message is under way in it any more."""
        self._group = None
        self._shut_down()


def _shut_down(group: ProcessGroup) -> None:
    """End what does not end with the last reference: a communicator of NCCL is only ever destroyed on demand."""
    for backend in backends(group).values():
        if backend.name() == "nccl":
            backend.shutdown()


def private_group(
    ranks: Sequence[int], own: int, name: str, backend: str, device: torch.device, timeout: timedelta | None
) -> ProcessGroup:
    """Connect some ranks. All of them call this at the same time.

    Args:
        ranks: of the members in the default group.
        own: the position of this rank among them.
        name: the same on all members, and never used before.
        backend: "gloo" or "nccl".
        device: the kind of device that the group serves.
        timeout: how long members wait for each other; None for the backend's default.
    """
    group = connect_group(f"thinwire/{name}/", ranks, own, backend, device, timeout, DESCRIPTION)
    if backend == "gloo":
        # A member that closes its connections at once must not do so while another is still connecting.
        group.barrier().wait()
    return group

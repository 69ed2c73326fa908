"""The ranks of a process group, and the rare messages between all of them."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from thinwire._torch_compat import backends, group_timeout
from thinwire.errors import PeerLost
from thinwire.transport.connections import Connection, abort_group, private_group

Result = TypeVar("Result")
_MARGIN_SECONDS = 1.0
"""Added to the timeout of the group, so that the backend's own error comes first."""
virtual_worker = threading.local()
"""On the thread of a virtual worker, `peers` is its `Peers`."""


@dataclass(frozen=True)
class Peers:
    """The members of a process group, and the rank of this process among them. A single process has no group."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | Peers | None) -> Peers:
        """The members of `process_group`, or of the default group, or this process alone. Peers are what they are.

        Raises:
            RuntimeError: a launcher has started several processes, but there is no process group.
            ValueError: this rank is not a member of the group.
        """
        if isinstance(process_group, Peers):
            return process_group
        virtual: Peers | None = getattr(virtual_worker, "peers", None)
        if virtual is not None and process_group is None:
            return virtual
        if not dist.is_available() or not dist.is_initialized():
            if process_group is not None:
                raise RuntimeError(f"process_group={process_group!r}, but torch.distributed is not initialised")
            _check_world_size()
            return cls(None, 0, 1)
        group = process_group if process_group is not None else dist.group.WORLD
        assert group is not None, "torch.distributed is initialised, so there is a default group"
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(
                f"process_group: rank {dist.get_rank()} is not a member of it; use thinwire on its members only"
            )
        return cls(group, rank, dist.get_world_size(group))

    @property
    def threaded(self) -> bool:
        """Whether lanes are threads, which wait for other ranks while this one computes."""
        return self.size > 1

    def ranks(self) -> list[int]:
        """The members' ranks in the default group, in order."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    def check_initialized_first(self) -> None:
        """Check that a rank that runs alone was not meant to have peers.

        Raises:
            RuntimeError: torch.distributed was initialised after this object was made.
        """
        if self.group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                f"torch.distributed has {dist.get_world_size()} ranks, but was initialised after thinwire was set up. "
                "This rank would train alone: call init_process_group() first"
            )

    def gather(self, value: Any, stage: str = "the values of all ranks", step: int | None = None) -> list[Any]:
        """The values of all ranks, in order. Slow: for use outside of steps.

        Args:
            value: the value of this rank; it is pickled.
            stage: what the value is for, for the error.
            step: the step under way, if there is one, for the error.

        Raises:
            PeerLost: a rank does not answer.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._run(lambda: dist.all_gather_object(values, value, group=self.group), stage, step)
        return values

    def gather_integer(self, value: int, stage: str, step: int | None = None) -> list[int]:
        """Like `gather`, for a 64-bit integer, without pickling."""
        if self.size == 1:
            return [value]
        device = self._device

        def gather() -> list[int]:
            values = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.size)]
            dist.all_gather(values, torch.tensor([value], dtype=torch.int64, device=device), group=self.group)
            return [int(each) for each in values]  # on a GPU this waits

        return self._run(gather, stage, step)

    def gather_float(self, value: float, stage: str, step: int | None = None) -> list[float]:
        """Like `gather_integer`, for a float: its 64 bits travel as an integer."""
        (bits,) = struct.unpack("<q", struct.pack("<d", value))
        of_ranks = self.gather_integer(bits, stage, step)
        return [struct.unpack("<d", struct.pack("<q", each))[0] for each in of_ranks]

    def gather_on(self, target: int, value: Any, stage: str) -> list[Any] | None:
        """The values of all ranks, in order, on rank `target`; None on the others.

        For large values: they are sent one after another, and only to the rank that needs them.

        Raises:
            PeerLost: a rank does not answer.
        """
        if self.size == 1:
            return [value]
        ranks, values = self.ranks(), [value] * self.size
        for source in range(self.size):
            if source == target:
                continue
            received: list[Any] = [None]
            if self.rank == source:
                self._run(partial(dist.send_object_list, [value], ranks[target], group=self.group), stage)
            elif self.rank == target:
                self._run(partial(dist.recv_object_list, received, ranks[source], group=self.group), stage)
                values[source] = received[0]
            self.gather(None, stage)  # the next one begins now: its time limit must not run out while it waits
        return values if self.rank == target else None

    def connect(self, members: Sequence[int], name: str, device: torch.device) -> Connection | None:
        """Open a private connection between some of the ranks. Only these ranks call this. None for a single rank.

        Args:
            members: their ranks among these peers.
            name: equal on all members, and never used before.
            device: the device of the packets.

        Raises:
            PeerLost: a member does not connect.
        """
        if self.group is None or len(members) == 1:
            return None
        ranks, timeout = self.ranks(), group_timeout(self.group)
        connected = [ranks[member] for member in members]
        own, backend = members.index(self.rank), backends(self.group)[device.type].name()

        def connect() -> dist.ProcessGroup:
            return private_group(connected, own, name, backend, device, timeout, self._store)

        return Connection(self._run(connect, "connections between ranks"))

    def check_backend(self, device: torch.device) -> None:
        """Check that the process group can exchange tensors on a device.

        Raises:
            ValueError: the backend does not serve the device, or this process is not set up for it.
        """
        if self.group is None or self.size == 1:
            return
        names = {kind: backend.name() for kind, backend in backends(self.group).items()}
        wanted = "nccl" if device.type == "cuda" else "gloo"
        if names.get(device.type) != wanted:
            listed = ", ".join(f"{kind}: {name}" for kind, name in sorted(names.items()))
            raise ValueError(
                f"parameters on {str(device)!r}, and a process group that serves {listed}: expected one with {wanted} "
                f"for {device.type}. Call init_process_group() without a backend, or with {wanted!r}"
            )
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            raise ValueError(
                f"parameters on {str(device)!r}, but collectives would run on the current device, "
                f"cuda:{torch.cuda.current_device()}: call torch.cuda.set_device({device.index}) first"
            )
        world = dist.group.WORLD
        if world is not None and world.bound_device_id is not None and self.size < world.size():
            raise ValueError(
                f"process_group has {self.size} of {world.size()} ranks, and init_process_group was given device_id: "
                "torch then splits groups from the default one, which needs all ranks. Leave device_id out"
            )

    @property
    def _store(self) -> dist.Store | None:
        """In which members find each other to connect; None for the store of the default group."""
        return None

    @property
    def _device(self) -> torch.device:
        """The device of gathered values: the CPU, or the current GPU if the group does not serve CPUs."""
        assert self.group is not None, "there are other ranks"
        kinds = backends(self.group).keys()
        return torch.device("cpu") if "cpu" in kinds or not kinds else torch.device("cuda", torch.cuda.current_device())

    def _run(self, call: Callable[[], Result], stage: str, step: int | None = None) -> Result:
        """Return the result of `call`, which waits for other ranks.

        It runs on a thread, because inside torch neither Ctrl-C nor, if the rendezvous is unreachable, a timeout would
        interrupt it.
        """
        assert self.group is not None, "there are other ranks"
        timeout, device = group_timeout(self.group), self._device
        result: futures.Future[Result] = futures.Future()
        thread = threading.Thread(target=_set_result, args=(result, call, device), name="thinwire-peers", daemon=True)
        try:
            thread.start()  # inside the try: Ctrl-C may come as soon as it runs
            return result.result(None if timeout is None else timeout.total_seconds() + _MARGIN_SECONDS)
        except BaseException as error:
            abort_group(self.group)  # other ranks must not wait for this one, nor its own thread for them
            if thread.is_alive():
                thread.join(_MARGIN_SECONDS)
            # torch.distributed raises RuntimeErrors, but not these two subclasses.
            if isinstance(error, (NotImplementedError, RecursionError)):
                raise
            if isinstance(error, (RuntimeError, futures.TimeoutError)):
                raise PeerLost(stage, str(error) or "no answer", step=step) from error
            raise


def _set_result(result: futures.Future[Result], call: Callable[[], Result], device: torch.device) -> None:
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a new thread has the first GPU
        result.set_result(call())
    except BaseException as error:  # raised again on the thread that waits
        result.set_exception(error)


def _check_world_size() -> None:
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdigit() and int(world_size) > 1:
        raise RuntimeError(
            f"WORLD_SIZE={world_size}, but torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() first, or unset WORLD_SIZE to train alone"
        )

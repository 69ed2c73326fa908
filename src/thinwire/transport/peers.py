"""The ranks that train together, as torch.distributed knows them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from thinwire._torch_compat import backends, group_timeout
from thinwire.errors import PeerLost
from thinwire.transport.connections import Connection, private_group
from thinwire.transport.messages import hang_up

Result = TypeVar("Result")
_SOON = 1.0
"""Seconds that are no matter, beside a timeout."""
here = threading.local()
"""On the thread of a virtual worker, `peers` are the others."""


@dataclass(frozen=True)
class Peers:
    """The workers that exchange with each other: their group, how many, and which of them this one is."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None) -> Peers:
        """The members of `process_group`, of the default group, or this process alone.

        Raises:
            RuntimeError: when a launcher says there are several processes, but nobody made a process group.
        """
        virtual: Peers | None = getattr(here, "peers", None)
        if virtual is not None and process_group is None:
            return virtual
        if not dist.is_available() or not dist.is_initialized():
            if process_group is not None:
                raise RuntimeError(f"process_group={process_group!r}, but torch.distributed is not initialised")
            _refuse_forgotten_group()
            return cls(None, 0, 1)
        group = process_group if process_group is not None else dist.group.WORLD
        assert group is not None, "torch.distributed is initialised, so there is a default group"
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(
                f"process_group: rank {dist.get_rank()} is not a member of it; make the optimizer on its members only"
            )
        return cls(group, rank, dist.get_world_size(group))

    @property
    def threaded(self) -> bool:
        """Whether lanes are threads, which wait for other workers while this one computes."""
        return self.size > 1

    def ranks(self) -> list[int]:
        """Their ranks in the default group, in order."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    def refuse_late_group(self) -> None:
        """Refuse a worker that took itself to be alone, because the process group was made after the optimizer."""
        if self.group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                f"torch.distributed has {dist.get_world_size()} ranks, but was initialised after the optimizer was "
                "made, which would train alone: call init_process_group() first"
            )

    def gather(self, value: Any, stage: str = "what all ranks have to say", step: int | None = None) -> list[Any]:
        """Everybody's value, in the order of ranks (a slow path, for what is rarely asked).

        Raises:
            PeerLost: when a rank does not answer; it names the stage and the step.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._reach(lambda: dist.all_gather_object(values, value, group=self.group), stage, step)
        return values

    def gather_integer(self, value: int, stage: str, step: int | None = None) -> list[int]:
        """The same for 64 bits, which are all that travels."""
        if self.size == 1:
            return [value]
        device = self._device

        def all_of_them() -> list[int]:
            values = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.size)]
            dist.all_gather(values, torch.tensor([value], dtype=torch.int64, device=device), group=self.group)
            return [int(each) for each in values]  # on a GPU this is what waits

        return self._reach(all_of_them, stage, step)

    def connect(self, members: Sequence[int], name: str, device: torch.device) -> Connection | None:
        """A connection of some of the ranks that nobody else uses, so that its messages cannot mix with others'.

        Only its members call this. None for a single one.

        Args:
            members: their ranks among these peers.
            name: the same on all members, and never used before.
            device: that of what is exchanged.

        Raises:
            PeerLost: when it cannot be made.
        """
        if self.group is None or len(members) == 1:
            return None
        ranks, timeout = self.ranks(), group_timeout(self.group)
        connected = [ranks[member] for member in members]
        own, backend = members.index(self.rank), backends(self.group)[device.type].name()

        def connect() -> dist.ProcessGroup:
            return private_group(connected, own, name, backend, device, timeout)

        return Connection(self._reach(connect, "connections between ranks"))

    def refuse_group_without(self, device: torch.device) -> None:
        """Refuse a process group that cannot exchange what is on a device, or not from this process as it is.

        Raises:
            ValueError: naming both.
        """
        if self.group is None or self.size == 1:
            return
        names = {kind: backend.name() for kind, backend in backends(self.group).items()}
        wanted = "nccl" if device.type == "cuda" else "gloo"
        if names.get(device.type) != wanted:
            listed = ", ".join(f"{kind}: {name}" for kind, name in sorted(names.items()))
            raise ValueError(
                f"parameters on {str(device)!r}, and a process group that serves {listed}: expected one with {wanted} "
                f"for {device.type}, as init_process_group() without a backend makes, or with {wanted!r}"
            )
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            raise ValueError(
                f"parameters on {str(device)!r}, but the current device is cuda:{torch.cuda.current_device()}, where "
                f"collectives would be: call torch.cuda.set_device({device.index}) first"
            )
        world = dist.group.WORLD
        if world is not None and world.bound_device_id is not None and self.size < world.size():
            raise ValueError(
                f"process_group has {self.size} of {world.size()} ranks, and init_process_group was given device_id: "
                "torch then makes groups out of the default one, by all ranks or none. Leave device_id out"
            )

    @property
    def _device(self) -> torch.device:
        """Where tensors of slow paths are: on the CPU, or where the group serves none on the GPU of this process."""
        assert self.group is not None, "there are other ranks"
        kinds = backends(self.group).keys()
        return torch.device("cpu") if "cpu" in kinds or not kinds else torch.device("cuda", torch.cuda.current_device())

    def _reach(self, call: Callable[[], Result], stage: str, step: int | None = None) -> Result:
        """What `call` returns, which waits for other ranks.

        It does so on a thread: inside torch no Ctrl-C gets to it, and no timeout if the rendezvous is out of reach.
        """
        assert self.group is not None, "there are other ranks"
        timeout, device = group_timeout(self.group), self._device
        outcome: futures.Future[Result] = futures.Future()
        thread = threading.Thread(target=_fulfil, args=(outcome, call, device), name="thinwire-reach", daemon=True)
        try:
            thread.start()  # inside: Ctrl-C may come as soon as it runs
            return outcome.result(None if timeout is None else timeout.total_seconds() + _SOON)
        except BaseException as error:
            hang_up(self.group)  # nobody shall wait for this rank any more, nor its own thread for others
            if thread.is_alive():
                thread.join(_SOON)
            # Errors of torch.distributed are RuntimeErrors, but not those two kinds.
            if isinstance(error, (NotImplementedError, RecursionError)):
                raise
            if isinstance(error, (RuntimeError, futures.TimeoutError)):
                raise PeerLost(stage, str(error) or "no answer", step=step) from error
            raise


def _fulfil(outcome: futures.Future[Result], call: Callable[[], Result], device: torch.device) -> None:
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread begins with the first
        outcome.set_result(call())
    except BaseException as error:  # raised again, on the thread that waits
        outcome.set_exception(error)


def _refuse_forgotten_group() -> None:
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdigit() and int(world_size) > 1:
        raise RuntimeError(
            f"WORLD_SIZE={world_size}, but torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() before making the optimizer, or unset WORLD_SIZE to train alone"
        )

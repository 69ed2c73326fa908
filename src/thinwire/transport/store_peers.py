"""The members of a process group that torch.distributed does not know, because it lives only until they change."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.transport.peers import Peers


@dataclass(frozen=True)
class StorePeers(Peers):
    """Peers that find each other in a store of their own.

    The functions of torch.distributed accept only groups that it has registered, which live as long as the process.
    This class calls the methods of the group instead.
    """

    store: dist.Store = field(kw_only=True)

    @property
    def _store(self) -> dist.Store:
        return self.store

    def ranks(self) -> list[int]:
        """See `Peers`."""
        return list(range(self.size))

    def check_initialized_first(self) -> None:
        """See `Peers`. The default group plays no part."""

    def gather(self, value: Any, stage: str = "the values of all ranks", step: int | None = None) -> list[Any]:
        """See `Peers`."""
        if self.size == 1:
            return [value]
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        gathered = self._run(lambda: self._gather_bytes(own), stage, step)
        return [pickle.loads(each.numpy().tobytes()) for each in gathered]

    def gather_integer(self, value: int, stage: str, step: int | None = None) -> list[int]:
        """See `Peers`."""
        return self.gather(value, stage, step)

    def gather_on(self, target: int, value: Any, stage: str) -> list[Any] | None:
        """See `Peers`."""
        values = self.gather(value, stage)
        return values if self.rank == target else None

    def _gather_bytes(self, own: Tensor) -> Sequence[Tensor]:
        lengths = [int(length) for length in self._all_gather(torch.tensor([own.numel()]))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: own.numel()] = own
        return [each[:length] for each, length in zip(self._all_gather(padded), lengths, strict=True)]

    def _all_gather(self, own: Tensor) -> list[Tensor]:
        assert self.group is not None, "there are other ranks"
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        work = self.group.allgather([gathered], [own])
        work.wait()
        return gathered

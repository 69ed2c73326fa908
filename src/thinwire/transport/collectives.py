"""Packets between the members of a process group by collectives, for devices.

On NCCL a collective is work in a stream's queue: the host does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire._torch_compat import all_gather, all_to_all
from thinwire.transport.connections import Connection
from thinwire.transport.messages import MessagesFailed


class Collectives:
    """The collectives of an exchange. Row `i` belongs to member `i`.

    Args:
        connection: used by nothing else.
        own: this rank's position among the members.
        ranks: the members, as ranks of the caller's process group.
        device: the device of the packets.
    """

    def __init__(self, connection: Connection, own: int, ranks: Sequence[int], device: torch.device) -> None:
        self._connection = connection
        self._ranks = list(ranks)
        self.own = own
        self.rank = self._ranks[own]
        self.senders = torch.tensor(self._ranks, dtype=torch.int64, device=device)

    @property
    def others(self) -> int:
        """The number of other members."""
        return len(self._ranks) - 1

    def scatter(self, rows: Tensor, into: Tensor) -> None:
        """Send every member its row, and receive one from each."""
        self._run(lambda: all_to_all(self._connection.group, into.view(-1), rows.view(-1)))

    def gather(self, rows: Tensor) -> None:
        """Send every member this rank's row, and receive theirs."""
        self._run(lambda: all_gather(self._connection.group, rows.view(-1), rows[self.own]))

    def _run(self, collective: Callable[[], dist.Work | None]) -> None:
        try:
            work = collective()
            assert work is not None, "this rank is a member of the group"
            work.wait()  # on NCCL the stream waits, not the host
        except RuntimeError as error:
            others = [rank for rank in self._ranks if rank != self.rank]
            raise MessagesFailed(others, error) from error

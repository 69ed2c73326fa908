"""Packets between the members of a process group, one message each, matched by tag.

Not by collectives, for three reasons. On gloo a sender waits until the receiver has said that it is ready, and inside
an all-to-all that word queues behind the receiver's own packets: on links of 100 Mbit/s, 4 ranks of 900 kB each take
100 ms, where receives that were posted beforehand take 62 and the bytes alone 54. An answer goes to everybody from
where it lies, without copies. And as messages find each other by tag, buckets need not wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from thinwire._torch_compat import backends
from thinwire.errors import PeerLost
from thinwire.transport.connections import Connection
from thinwire.transport.memory import HOST

Pending = list[tuple[int, Work]]
"""Messages under way, each with the rank at its other end."""

_WHY_CLOSED = "That rank has ended or given up, or has called load_state_dict() or close() while others did not"
_AT_ONCE = timedelta(milliseconds=1)
_NOBODY_SENDS = (1 << 31) - 1
"""A tag."""


class Silence(Exception):
    """Messages that have not come, or not gone; to be turned into a `PeerLost` by whoever knows what they were for.

    Args:
        ranks: at their other ends.
        cause: what the backend said.
    """

    def __init__(self, ranks: Sequence[int], cause: RuntimeError) -> None:
        self.ranks = tuple(ranks)
        self.cause = cause
        # gloo closes all connections of a group when one wait in it times out, and this is not that wait.
        self.secondhand = "caused pair closure" in str(cause)
        super().__init__(ranks, cause)


@contextmanager
def waiting_for(stage: str, step: int, bucket: int | None = None) -> Iterator[None]:
    """Tell what messages are for, should they not come.

    Raises:
        PeerLost: naming all of it.
    """
    try:
        yield
    except Silence as silence:
        closed = "closed by peer" in str(silence.cause) or "reset by peer" in str(silence.cause)
        cause = f"{silence.cause}. {_WHY_CLOSED}" if closed else silence.cause
        lost = PeerLost(stage, cause, step=step, bucket=bucket, ranks=silence.ranks)
        lost.secondhand = silence.secondhand
        raise lost from silence.cause


class Messages:
    """Sends and receives rows, member `i`'s being row `i`. Rows must stay as they are until the messages are complete.

    Args:
        connection: nothing else may use these tags in it; None for somebody without peers, who has nothing to send.
        own: this process's position in it.
        ranks: of its members, as users know them.
    """

    def __init__(self, connection: Connection | None, own: int, ranks: Sequence[int]) -> None:
        self._connection = connection
        self._ranks = ranks
        # Everybody begins with somebody else, so that nobody hears from all at once.
        self._others = [(own + i) % len(ranks) for i in range(1, len(ranks))]

    @property
    def connected(self) -> bool:
        """Whether there is anybody to send to."""
        return self._connection is not None

    def receive(self, rows: Tensor, tag: int) -> Pending:
        """Expect a row from every other member."""
        return self._start([(i, rows[i]) for i in self._others], tag, sends=False)

    def send(self, rows: Tensor, tag: int) -> Pending:
        """Send every other member its row."""
        return self._start([(i, rows[i]) for i in self._others], tag, sends=True)

    def send_to_all(self, row: Tensor, tag: int) -> Pending:
        """Send every other member the same row."""
        return self._start([(i, row) for i in self._others], tag, sends=True)

    def _start(self, messages: Sequence[tuple[int, Tensor]], tag: int, *, sends: bool) -> Pending:
        if self._connection is None:
            return []
        group = self._connection.group
        pending: Pending = []
        refused: list[tuple[int, RuntimeError]] = []
        for member, row in messages:
            try:
                work = group.send([row], member, tag) if sends else group.recv([row], member, tag)
            except RuntimeError as error:
                refused.append((self._ranks[member], error))
            else:
                assert work is not None, "this rank is a member of the group"
                pending.append((self._ranks[member], work))
        if refused:
            raise Silence([rank for rank, _ in refused], refused[0][1]) from refused[0][1]
        return pending


def complete(pending: Pending) -> None:
    """Wait for messages, and forget them.

    Raises:
        Silence: naming those that are not complete within the group's timeout.
    """
    for i, (rank, work) in enumerate(pending):
        try:
            work.wait()
        except RuntimeError as error:
            # A connection that has failed is one rank's. After a timeout what has arrived is told from what has not.
            timeout = "Timed out waiting" in str(error)
            late = [other for other, w in pending[i + 1 :] if not _done(w)] if timeout else []
            raise Silence([rank, *late], error) from error
    pending.clear()


def _done(work: Work) -> bool:
    try:
        work.wait(_AT_ONCE)
    except RuntimeError:
        return False
    return True


def hang_up(group: ProcessGroup) -> None:
    """Let all waits in a group fail at once, here and, as connections close, at its other members."""
    served = backends(group)
    for backend in served.values():
        if backend.name() in ("nccl", "virtual"):
            backend.abort()  # collectives end then, whatever they have brought: headers and checksums tell
    if HOST.type not in served:
        return
    for member in range(group.size()):
        if member != group.rank():
            # gloo has no abort(). But a wait that times out closes all connections, those that are still open.
            with suppress(RuntimeError):
                work = group.recv([torch.empty(1, dtype=torch.uint8, device=HOST)], member, _NOBODY_SENDS)
                assert work is not None, "this rank is a member of the group"
                work.wait(_AT_ONCE)

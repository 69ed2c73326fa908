"""Packets between the members of a process group, one message each, matched by tag.

Messages have three advantages over collectives on gloo. A gloo sender waits until the receiver is ready; in an
all-to-all the receiver's notice queues behind its own packets. On links of 100 Mbit/s, 4 ranks of 900 kB each take
100 ms that way, 62 ms with receives that were posted beforehand, and 54 ms for the bytes alone. An answer is sent to
all members from where it lies, without copies. And buckets need not wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch import Tensor
from torch.distributed import Work

from thinwire.errors import PeerLost
from thinwire.transport.connections import Connection

Pending = list[tuple[int, Work]]
"""Incomplete messages, each with the rank at its other end."""

_WHY_CLOSED = "That rank has ended or aborted, or has called load_state_dict() or close() while others did not"
_SHORT_TIMEOUT = timedelta(milliseconds=1)


class MessagesFailed(Exception):
    """Messages that could not be sent or received. `waiting_for` turns it into a `PeerLost`.

    Args:
        ranks: the ranks at their other ends.
        cause: the error of the backend.
    """

    def __init__(self, ranks: Sequence[int], cause: RuntimeError) -> None:
        self.ranks = tuple(ranks)
        self.cause = cause
        # gloo closes all connections of a group when one wait in it times out. This is then not the wait that did.
        self.secondhand = "caused pair closure" in str(cause)
        super().__init__(ranks, cause)


@contextmanager
def waiting_for(stage: str, step: int, bucket: int | None = None) -> Iterator[None]:
    """Name the purpose of the messages in the block, for the error if they fail.

    Raises:
        PeerLost: with the stage, step, bucket and ranks.
    """
    try:
        yield
    except MessagesFailed as failed:
        closed = "closed by peer" in str(failed.cause) or "reset by peer" in str(failed.cause)
        cause = f"{failed.cause}. {_WHY_CLOSED}" if closed else failed.cause
        lost = PeerLost(stage, cause, step=step, bucket=bucket, ranks=failed.ranks)
        lost.secondhand = failed.secondhand
        raise lost from failed.cause


class Messages:
    """Sends and receives rows; row `i` belongs to member `i`. Rows must not change until their messages are complete.

    Args:
        connection: no one else uses these tags on it; None for a rank without peers, for which nothing is sent.
        own: this rank's position among the members.
        ranks: the members, as ranks of the caller's process group.
    """

    def __init__(self, connection: Connection | None, own: int, ranks: Sequence[int]) -> None:
        self._connection = connection
        self._ranks = ranks
        # Every member begins with another one, so that no link gets all messages at once.
        self._others = [(own + i) % len(ranks) for i in range(1, len(ranks))]

    @property
    def connected(self) -> bool:
        """Whether there are other members."""
        return self._connection is not None

    def receive(self, rows: Tensor, tag: int) -> Pending:
        """Post a receive for the row of every other member."""
        return self._start([(i, rows[i]) for i in self._others], tag, sends=False)

    def send(self, rows: Tensor | Sequence[Tensor], tag: int) -> Pending:
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
        failed: list[tuple[int, RuntimeError]] = []
        for member, row in messages:
            try:
                work = group.send([row], member, tag) if sends else group.recv([row], member, tag)
            except RuntimeError as error:
                failed.append((self._ranks[member], error))
            else:
                assert work is not None, "this rank is a member of the group"
                pending.append((self._ranks[member], work))
        if failed:
            raise MessagesFailed([rank for rank, _ in failed], failed[0][1]) from failed[0][1]
        return pending


def complete(pending: Pending) -> None:
    """Wait for messages, and remove them from the list.

    Wait for a send only when its receiver has answered with a message that it sends after it took this one. A send that
    meets a connection closed by the receiver stays in gloo's queue: gloo tells all receives of that connection, but not
    the sends in the queue (`Pair::signalException`), and such a wait ends with the timeout of the group only.

    Raises:
        MessagesFailed: naming the ranks whose messages are not complete within the group's timeout.
    """
    for i, (rank, work) in enumerate(pending):
        try:
            work.wait()
        except RuntimeError as error:
            # A failed connection is that of one rank. After a timeout, find out which other messages are late too.
            timeout = "Timed out waiting" in str(error)
            late = [other for other, w in pending[i + 1 :] if not _is_complete(w)] if timeout else []
            raise MessagesFailed([rank, *late], error) from error
    pending.clear()


def _is_complete(work: Work) -> bool:
    try:
        work.wait(_SHORT_TIMEOUT)
    except RuntimeError:
        return False
    return True

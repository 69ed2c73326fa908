"""Packets between the members of a process group, one message each, matched by tag.

Not by collectives, for three reasons. On gloo a sender waits until the receiver has said that it is ready, and inside
an all-to-all that word queues behind the receiver's own packets: on links of 100 Mbit/s, 4 ranks of 900 kB each take
100 ms, where receives that were posted beforehand take 62 and the bytes alone 54. An answer goes to everybody from
where it lies, without copies. And as messages find each other by tag, buckets need not wait for each other.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup, Work

Pending = list[Work]
"""Messages under way."""


class Messages:
    """Sends and receives rows, member `i`'s being row `i`. Rows must stay as they are until the messages are complete.

    Args:
        group: nothing else may use these tags in it; None for somebody without peers, who has nothing to send.
        own: this process's position in it.
        size: how many members there are.
    """

    def __init__(self, group: ProcessGroup | None, own: int, size: int) -> None:
        self._group = group
        # Everybody begins with somebody else, so that nobody hears from all at once.
        self._others = [(own + i) % size for i in range(1, size)]

    @property
    def connected(self) -> bool:
        """Whether there is anybody to send to."""
        return self._group is not None

    def receive(self, rows: Tensor, tag: int) -> Pending:
        """Expect a row from every other member."""
        return [] if self._group is None else [_started(self._group.recv([rows[i]], i, tag)) for i in self._others]

    def send(self, rows: Tensor, tag: int) -> Pending:
        """Send every other member its row."""
        return [] if self._group is None else [_started(self._group.send([rows[i]], i, tag)) for i in self._others]

    def send_to_all(self, row: Tensor, tag: int) -> Pending:
        """Send every other member the same row."""
        return [] if self._group is None else [_started(self._group.send([row], i, tag)) for i in self._others]


def complete(pending: Pending) -> None:
    """Wait for messages, and forget them."""
    for work in pending:
        work.wait()
    pending.clear()


def _started(work: Work | None) -> Work:
    assert work is not None, "this rank is a member of the group"
    return work

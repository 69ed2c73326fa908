"""What can go wrong with other ranks and with files, in a form that programs can tell apart.

All of them are RuntimeErrors. `PeerLost` and `CorruptPacket` are final for the optimizer that raises them: ranks may
have parted, so go on from a checkpoint, in new processes.
"""

from __future__ import annotations

from collections.abc import Sequence


class PeerLost(RuntimeError):
    """A rank is dead, frozen or out of reach; or it has lost somebody itself, and given up.

    Ranks are counted within the optimizer's process group.

    Args:
        stage: what was waited for.
        cause: what the backend said of it.
        step: the step under way, if there is one.
        bucket: the bucket, if it was one's.
        ranks: those that were waited for, as far as they are known.
    """

    secondhand = False
    """Whether all that is known is that another wait of this process has failed."""

    def __init__(
        self,
        stage: str,
        cause: object,
        step: int | None = None,
        bucket: int | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        self.stage, self.step, self.bucket, self.ranks = stage, step, bucket, tuple(ranks)
        self._cause = str(cause)
        where = [name_ranks(self.ranks)] if self.ranks else []
        where += [f"{name} {value}" for name, value in (("step", step), ("bucket", bucket)) if value is not None]
        told = f" ({', '.join(where)})" if where else ""
        super().__init__(f"lost a peer while waiting for {stage}{told}: {self._cause}")

    def __reduce__(self) -> tuple[type[PeerLost], tuple[object, ...]]:
        return type(self), (self.stage, self._cause, self.step, self.bucket, self.ranks)


class CorruptPacket(RuntimeError):
    """A packet is not the one that was due, or not as it was sent. Raised on all ranks, before any applies anything.

    But for packets that do not leave a node, in a local step of `thinwire.ZeroOneAdam`: its ranks raise it, and the
    others a `PeerLost` when they next need them.
    """


class ReplicasDiffer(RuntimeError):
    """Parameters that must be equal on all ranks are not. Raised on all ranks."""


class TooManySkips(RuntimeError):
    """Step after step had a gradient that was not finite. Raised on all ranks."""


class CorruptCheckpoint(RuntimeError):
    """A file of a checkpoint is missing, truncated, altered, or not what it should be. Raised on all ranks."""


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))

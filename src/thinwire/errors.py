"""Exceptions for failures of other ranks and of files, one class per kind, so that programs can tell them apart.

All of them are RuntimeErrors. After `PeerLost` or `CorruptPacket` the optimizer cannot be used again, because replicas
may have diverged: resume from a checkpoint in new processes.
"""

from __future__ import annotations

from collections.abc import Sequence


class PeerLost(RuntimeError):
    """Another rank is dead, frozen or unreachable, or it stopped because it lost a rank itself.

    Ranks are those of the optimizer's process group.

    Args:
        stage: what this rank was waiting for.
        cause: the error of the backend.
        step: the current step, if there is one.
        bucket: the bucket, if the wait was for one.
        ranks: the ranks that this rank was waiting for, as far as they are known.
    """

    secondhand = False
    """Whether this error only reports that another wait of this process has failed."""

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
        details = f" ({', '.join(where)})" if where else ""
        super().__init__(f"lost a peer while waiting for {stage}{details}: {self._cause}")

    def __reduce__(self) -> tuple[type[PeerLost], tuple[object, ...]]:
        return type(self), (self.stage, self._cause, self.step, self.bucket, self.ranks)


class CorruptPacket(RuntimeError):
    """A packet was damaged, or it was not the packet that was due. Raised on all ranks before any applies an answer.

    A rank that stops for a reason of its own, such as `GradientChanged`, is a CorruptPacket on the others.

    There is one exception: packets inside a node, in a local step of `thinwire.ZeroOneAdam`. The ranks of that node
    raise this error. The other ranks raise `PeerLost` when they next wait for that node.
    """

    field: str | None = None
    """The field of the header that was wrong, if it was one."""


class GradientChanged(RuntimeError):
    """A gradient was changed between backward, which had sent it, and `step()`. No rank applies the step."""


class ReplicasDiffer(RuntimeError):
    """Parameters that must be equal on all ranks are not. Raised on all ranks."""


class TooManySkips(RuntimeError):
    """Too many steps in a row had a non-finite gradient. Raised on all ranks."""


class CorruptCheckpoint(RuntimeError):
    """A file of a checkpoint is missing, truncated or altered, or has unexpected contents. Raised on all ranks."""


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))

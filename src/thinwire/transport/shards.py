"""The ranks of one replica, each with a shard of its parameters: what they must decide together.

With FSDP2 on a mesh of replicas and shards, the ranks that hold the same shard exchange packets. The ranks of one
replica exchange none, and would not know of each other's non-finite gradients, failures and learning rates. One integer
per rank and step, inside of the replica, settles these. All ranks with the same shard have settled them before, so the
result is the same on the whole mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from thinwire.errors import PeerLost, name_ranks
from thinwire.transport.peers import Peers

_NONFINITE, _FAILED = 1 << 32, 1 << 33
"""Above the 32 bits that must be equal."""
_STAGE = "the outcome of the other shards"


class Shards:
    """The ranks of a replica. With whole parameters it is this rank alone, and nothing is sent.

    Args:
        peers: the ranks, in the order of their shards.
    """

    def __init__(self, peers: Peers | None = None) -> None:
        self.peers = peers or Peers(None, 0, 1)
        self._settled = True

    @contextmanager
    def failing_together(self, step: int) -> Iterator[None]:
        """If the block fails before it has called `settle`, let `settle` fail on the other ranks."""
        self._settled = False
        try:
            yield
        except Exception:
            if not self._settled and self.peers.size > 1:
                with suppress(PeerLost):  # the ranks that are left fail too, and the first error is raised here
                    self.peers.gather_integer(_FAILED, _STAGE, step)
            raise

    def settle(self, step: int, *, nonfinite: bool, agreed: int) -> tuple[bool, int | None]:
        """Compare the outcome of an exchange. All ranks call this once per step.

        Args:
            step: the step.
            nonfinite: whether a gradient of this shard was not finite on any rank.
            agreed: 32 bits that must be equal on all ranks.

        Returns:
            Whether a gradient of any shard was not finite; and a rank of the replica whose `agreed` differs, if any.

        Raises:
            RuntimeError: if the step has failed on another rank.
            PeerLost: if a rank does not answer.
        """
        if self.peers.size == 1:
            return nonfinite, None
        found = self.peers.gather_integer(agreed | (_NONFINITE if nonfinite else 0), _STAGE, step)
        self._settled = True
        ranks = self.peers.ranks()
        failed = [ranks[i] for i, each in enumerate(found) if each & _FAILED]
        if failed:
            raise RuntimeError(
                f"step {step} has failed on {name_ranks(failed)}, which holds another shard of the same replica: no "
                "rank of the mesh takes it. The error there says why. Resume from a checkpoint"
            )
        other = next((i for i, each in enumerate(found) if (each ^ agreed) & (_NONFINITE - 1)), None)
        return any(each & _NONFINITE for each in found), other

"""What a run of weeks is watched for: replicas that part, and steps that are skipped one after the other."""

from __future__ import annotations

import hashlib
import logging
import struct
from collections import defaultdict
from typing import TYPE_CHECKING

from thinwire._checks import INT64_MAX, is_integer
from thinwire.errors import PeerLost, ReplicasDiffer, TooManySkips, name_ranks
from thinwire.optimizers.inputs import checksum

if TYPE_CHECKING:
    from thinwire.optimizers.optimizer import WireOptimizer


_LOG = logging.getLogger("thinwire")


class Skips:
    """Counts steps in a row that no rank took.

    Args:
        most: how many there may be before it is an error; None for any number.

    Raises:
        ValueError: for a number that is none.
    """

    def __init__(self, most: int | None) -> None:
        if most is not None and not is_integer(most, 1, INT64_MAX):
            raise ValueError(f"max_consecutive_skips={most!r}: expected a positive number of steps, or None")
        self.most = most
        self._in_a_row = 0

    def forget(self) -> None:
        """Start counting anew."""
        self._in_a_row = 0

    def note(self, step: int, *, skipped: bool) -> None:
        """Count a step, and log the first of several that are skipped.

        Raises:
            TooManySkips: on all ranks, because they skip together.
        """
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._in_a_row == 1:
            _LOG.warning("step %d was skipped on all ranks: a gradient was not finite, or its square is not", step)
        if self.most is not None and self._in_a_row >= self.most:
            raise TooManySkips(
                f"{self._in_a_row} steps in a row, up to step {step}, were skipped "
                f"(max_consecutive_skips={self.most}), each because a gradient on some rank was not finite, or beyond "
                "1e18, where its square overflows: nothing is learnt any more. Look for too large a learning rate or a "
                "rank with bad data, and go on from a checkpoint before the first of them"
            )


class ReplicaCheck:
    """Compares, every so many steps, 64 bits that stand for all parameters.

    Args:
        every: how many steps; 0 for never.

    Raises:
        ValueError: for a number that is none.
    """

    def __init__(self, every: int) -> None:
        if not is_integer(every, 0, INT64_MAX):
            raise ValueError(f"check_replicas_every={every!r}: expected a number of steps, or 0 for never")
        self.every = every

    def after(self, optimizer: WireOptimizer, step: int) -> None:
        """Look at the replicas, if it is time.

        Raises:
            ReplicasDiffer: on all ranks, naming the first parameter that differs, and where.
            PeerLost: when a rank does not answer.
        """
        if not self.every or step % self.every or optimizer._peers.size == 1:
            return
        checksums = [_checksum_of(optimizer, position) for position in range(len(optimizer._flat_params))]
        digest = hashlib.blake2b(struct.pack(f"<{len(checksums)}Q", *checksums), digest_size=8).digest()
        peers, stage = optimizer._peers, "the checksums of replicas"
        try:
            if len(set(peers.gather_integer(int.from_bytes(digest, "little", signed=True), stage, step))) > 1:
                self._name_what_differs(optimizer, step, peers.gather(checksums, stage, step))
        except PeerLost as lost:
            optimizer._session.transport.abort(lost)
            raise

    def _name_what_differs(self, optimizer: WireOptimizer, step: int, of_ranks: list[list[int]]) -> None:
        # The flat order is the reverse of the optimizer's, and people count from the first.
        for position in reversed(range(len(of_ranks[0]))):
            holders: dict[int, list[int]] = defaultdict(list)
            for rank, checksums in enumerate(of_ranks):
                holders[checksums[position]].append(rank)
            if len(holders) > 1:
                parties = ", another on ".join(name_ranks(ranks) for ranks in sorted(holders.values(), key=len))
                raise ReplicasDiffer(
                    f"after step {step} {_name_of(optimizer, position)} differs between ranks: one value on {parties}. "
                    "Something but the optimizer wrote to it, or memory is faulty: go on from a checkpoint"
                )
        raise AssertionError("digests differ, so some checksum does")


def _name_of(optimizer: WireOptimizer, position: int) -> str:
    name = optimizer._names.get(optimizer._flat_params[position])
    return f"parameter {optimizer._session.layout.slots[position].index}" if name is None else f"parameter {name!r}"


def _checksum_of(optimizer: WireOptimizer, position: int) -> int:
    """Of what all ranks hold of a parameter, and of its fp32 master."""
    value = checksum(optimizer._rule.agreed_value(position))
    master = optimizer._state_of[position].get("master")
    if master is None or not optimizer.is_synchronized:
        return value
    return value | checksum(master) << 32

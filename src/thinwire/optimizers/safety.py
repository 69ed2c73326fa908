"""Checks for long runs: replicas that diverge, and too many skipped steps in a row."""

from __future__ import annotations

import hashlib
import logging
import struct
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinwire._checks import INT64_MAX, is_integer
from thinwire.errors import PeerLost, ReplicasDiffer, TooManySkips, name_ranks
from thinwire.optimizers.inputs import checksum
from thinwire.transport.failures import on_all_ranks

if TYPE_CHECKING:
    from thinwire.optimizers.optimizer import WireOptimizer


_LOG = logging.getLogger("thinwire")


@dataclass(frozen=True)
class SkipWords:
    """What messages say about a skipped step, which is not the same for all that exchange."""

    first: str
    """The warning for the first of several in a row, with the step as %d."""
    many: str
    """What has happened several times in a row, with `count`, `step` and `limit`."""


OF_STEPS = SkipWords(
    "step %d was skipped on all ranks: a gradient or its square was not finite",
    "{count} steps in a row, up to step {step}, were skipped {limit} because a gradient on some rank was not finite, "
    "or above 1e18, where its square overflows. The model no longer changes",
)
"""Of an optimizer."""
OF_AVERAGES = SkipWords(
    "exchange %d: a gradient was not finite, so all gradients are NaN on all ranks",
    "in {count} exchanges in a row, up to exchange {step}, a gradient on some rank was not finite {limit}. The "
    "optimizer got no usable gradient since then",
)
"""Of an exchange that only averages gradients, for an optimizer of the user."""


class Skips:
    """Counts consecutive skipped steps.

    Args:
        most: this many in a row are an error; None for no limit.
        words: what messages say.

    Raises:
        ValueError: if it is not such a number.
    """

    def __init__(self, most: int | None, words: SkipWords = OF_STEPS) -> None:
        if most is not None and not is_integer(most, 1, INT64_MAX):
            raise ValueError(f"max_consecutive_skips={most!r}: expected a positive number of steps, or None")
        self.most = most
        self._words = words
        self._in_a_row = 0

    def reset(self) -> None:
        """Restart the count."""
        self._in_a_row = 0

    def note(self, step: int, *, skipped: bool) -> None:
        """Count a step, and log the first of several consecutive skipped steps.

        Raises:
            TooManySkips: on all ranks, because all ranks skip the same steps.
        """
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._in_a_row == 1:
            _LOG.warning(self._words.first, step)
        if self.most is not None and self._in_a_row >= self.most:
            limit = f"(max_consecutive_skips={self.most})"
            raise TooManySkips(
                f"{self._words.many.format(count=self._in_a_row, step=step, limit=limit)}. Look for a learning rate "
                "that is too large or a rank with bad data, and resume from a checkpoint before the first of them"
            )


class ReplicaCheck:
    """Compares a 64-bit hash of all parameters across ranks, and whether all ranks made state dicts since then.

    Args:
        every: the number of steps between two comparisons; 0 for never.

    Raises:
        ValueError: if it is not such a number.
    """

    def __init__(self, every: int) -> None:
        if not is_integer(every, 0, INT64_MAX):
            raise ValueError(f"check_replicas_every={every!r}: expected a number of steps, or 0 for never")
        self.every = every

    def after(self, optimizer: WireOptimizer, step: int) -> None:
        """Compare the replicas if `step` is a multiple of `every`.

        Raises:
            ReplicasDiffer: on all ranks, naming the first parameter that differs and the ranks that have each value.
            PeerLost: if a rank does not answer.
        """
        if self.every and step % self.every == 0 and optimizer._peers.size > 1:
            on_all_ranks(optimizer._shards.peers, lambda: self._compare(optimizer, step))

    def _compare(self, optimizer: WireOptimizer, step: int) -> None:
        checksums = [_checksum_of(optimizer, position) for position in range(len(optimizer._flat_params))]
        peers, stage, saves = optimizer._peers, "the checksums of replicas", optimizer._lone_saves
        # One number for both comparisons: both are rarely unequal.
        numbers = struct.pack(f"<{len(checksums) + 1}Q", saves.count > 0, *checksums)
        digest = int.from_bytes(hashlib.blake2b(numbers, digest_size=8).digest(), "little", signed=True)
        try:
            if len(set(peers.gather_integer(digest, stage, step))) == 1:
                saves.count = 0
                return
            of_ranks = peers.gather((checksums, saves.count), stage, step)
        except PeerLost as lost:
            optimizer._session.transport.abort(lost)
            raise
        self._check_equal(optimizer, step, [checksums for checksums, _ in of_ranks])
        saves.compare([count for _, count in of_ranks], peers.rank)

    def _check_equal(self, optimizer: WireOptimizer, step: int, of_ranks: list[list[int]]) -> None:
        # The flat order is the reverse of the optimizer's. Report the first parameter in the optimizer's order.
        for position in reversed(range(len(of_ranks[0]))):
            holders: dict[int, list[int]] = defaultdict(list)
            for rank, checksums in enumerate(of_ranks):
                holders[checksums[position]].append(rank)
            if len(holders) > 1:
                parties = ", another on ".join(name_ranks(ranks) for ranks in sorted(holders.values(), key=len))
                raise ReplicasDiffer(
                    f"after step {step} {name_of(optimizer, position)} differs between ranks: one value on {parties}. "
                    "Code other than the optimizer wrote to it, or memory is faulty. Resume from a checkpoint"
                )


def name_of(optimizer: WireOptimizer, position: int) -> str:
    """The name of a parameter in messages: its own, or its index."""
    name = optimizer._names.get(optimizer._flat_params[position])
    return f"parameter {optimizer._session.layout.slots[position].index}" if name is None else f"parameter {name!r}"


def _checksum_of(optimizer: WireOptimizer, position: int) -> int:
    """The checksums of the value of a parameter that all ranks share and of its fp32 master, in one number."""
    value = checksum(optimizer._rule.agreed_value(position))
    master = optimizer._state_of[position].get("master")
    if master is None or not optimizer._rule.is_synchronized:
        return value
    return value | checksum(master) << 32

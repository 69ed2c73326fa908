"""The numbers of parameter groups (learning rates and the like), which must be equal on all ranks in every step.

Each rank applies the answers with its own. If they differ, replicas diverge. Ranks compare a hash in the commit round
of each exchange, before any of them applies anything. It covers the local steps since the last exchange, too. If the
hashes differ, all ranks gather the numbers and raise the same error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from torch import Tensor

from thinwire.optimizers.agreement import group_fields, raise_first_difference
from thinwire.transport.packet import Disagreement
from thinwire.transport.peers import Peers


class GroupNumbers:
    """The numbers of all steps since ranks agreed on everything."""

    def __init__(self) -> None:
        self._last: list[Any] = []
        self._digest = b""
        """Of `_last`."""
        self.restart()

    def restart(self) -> None:
        """Begin again. All ranks do this when they agree on everything."""
        self._chain = b""
        self._step: int | None = None
        """That was noted last."""
        self._unconfirmed: list[tuple[int, dict[str, Any]]] = []
        """The step and the numbers of each step since the last exchange with all ranks."""

    def note(self, step: int, groups: Sequence[dict[str, Any]]) -> int:
        """Add the numbers of a step. Returns 32 bits that depend on those of all steps so far.

        Again for the same step, it changes nothing, if the numbers are the same.
        """
        values = [float(value) if isinstance(value, Tensor) else value for value in _values(groups)]
        if step == self._step and values == self._last:
            return self._bits()
        self._step = step
        if values != self._last or not self._digest:
            self._last = values
            self._fields = dict(group_fields(groups))
            self._digest = hashlib.blake2b(repr(sorted(self._fields.items())).encode(), digest_size=8).digest()
        self._unconfirmed.append((step, self._fields))
        self._chain = hashlib.blake2b(self._chain + self._digest, digest_size=8).digest()
        return self._bits()

    def _bits(self) -> int:
        return int.from_bytes(self._chain[:4], "little")

    def confirm(self) -> None:
        """All ranks have had the same numbers so far."""
        self._unconfirmed.clear()

    def raise_difference(self, peers: Peers, found: Disagreement) -> NoReturn:
        """Gather the numbers of all ranks, and name the first that differs. All ranks call this.

        Raises:
            RuntimeError: on every rank, naming the parameter group, the number, and its values.
            PeerLost: if a rank does not answer.
            CorruptPacket: if no number differs, for the reason that the exchange has failed for before.
        """
        of_ranks = peers.gather(self._unconfirmed, "the numbers of parameter groups", found.step)
        for of_one_step in zip(*of_ranks, strict=False):
            steps = {step for step, _ in of_one_step}
            raise_first_difference([fields for _, fields in of_one_step], f" in step {max(steps)}")
        raise found.earlier or found


def _values(groups: Sequence[dict[str, Any]]) -> Iterable[Any]:
    return (value for group in groups for key, value in group.items() if key != "params")

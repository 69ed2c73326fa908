"""Tells the user when the state of one rank is saved without those of the others, before it is needed."""

from __future__ import annotations

from thinwire._callers import calling_module, warn_user
from thinwire.errors import name_ranks

_SAVE_ONE_RANK = ("accelerate.checkpointing", "transformers.trainer")
"""Modules that save the state dict of one rank only, whichever ranks make one."""

_ADVICE = (
    "Call consolidate_state_dict() on all ranks before state_dict(); or let every rank save its own, in its own file, "
    "or with thinwire.checkpoint or torch.distributed.checkpoint"
)


class LoneSaves:
    """Counts the state dicts that this rank made of its own state, to compare the counts of all ranks.

    A rank that makes a state dict cannot know whether the others do. Ranks compare their counts with the replicas.
    """

    def __init__(self) -> None:
        self.count = 0
        """Since the last comparison."""
        self._warned = False

    def note(self, rank: int) -> None:
        """Count a state dict. Warn if it was made by code that is known to save one rank only."""
        self.count += 1
        module = calling_module()
        if rank == 0 and module in _SAVE_ONE_RANK:
            self._warn(
                f"{module.partition('.')[0]} saves the optimizer state of rank 0 only, and each rank has its own: the "
                f"others cannot resume from it exactly. {_ADVICE}"
            )

    def compare(self, counts: list[int], rank: int) -> None:
        """Warn if this rank made state dicts and another did not. Restart the count. All ranks call it together."""
        self.count = 0
        without = [other for other, count in enumerate(counts) if not count]
        if counts[rank] and without:
            self._warn(
                f"state_dict() was called on {name_ranks([rank])}, but not on {name_ranks(without)}. Each rank has its "
                f"own state, and the others cannot resume from this one exactly. {_ADVICE}"
            )

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warn_user(message)

"""Ranks that fail together: what goes wrong on one of them is raised on all, so that none waits for ever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from thinwire.errors import CorruptCheckpoint, PeerLost, name_ranks
from thinwire.wire.peers import Peers

T = TypeVar("T")

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (CorruptCheckpoint, OSError, ValueError, TypeError, RuntimeError)
}
"""What arrives on other ranks: the first of these that an exception is, or RuntimeError."""

_NAMED = 8
"""So many different complaints are told; the others are counted."""


def together(peers: Peers, action: Callable[[], T]) -> T:
    """What `action` returns, once it has returned on every rank.

    Raises:
        Exception: on every rank, if it raised on any: of one kind on all, naming the ranks and what they said.
    """
    if peers.size == 1:
        return action()
    try:
        value = action()
    except PeerLost:
        raise  # the others know, or will
    except Exception as error:
        raise _sum_up(peers.gather(_describe(error))) from error
    outcomes = peers.gather(None)
    if any(outcomes):
        raise _sum_up(outcomes)
    return value


def _describe(error: Exception) -> tuple[str, str]:
    kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), None)
    if kind is None:
        return RuntimeError.__name__, f"{type(error).__name__}: {error}"
    return kind, str(error)


def _sum_up(outcomes: list[tuple[str, str] | None]) -> Exception:
    failures = [(rank, *outcome) for rank, outcome in enumerate(outcomes) if outcome is not None]
    complaints: dict[str, list[int]] = defaultdict(list)
    for rank, _, said in failures:
        complaints[said].append(rank)
    # The same on all ranks, so that a caller who catches it does so on all.
    kind = _KINDS[failures[0][1]]
    if len(complaints) == 1 and len(failures) == len(outcomes):
        return kind(*complaints)
    told = [f"{name_ranks(ranks)}: {said}" for said, ranks in list(complaints.items())[:_NAMED]]
    if len(complaints) > _NAMED:
        told.append(f"and {len(complaints) - _NAMED} more")
    return kind("; ".join(told))

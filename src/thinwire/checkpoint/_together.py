"""Ranks that fail together: what goes wrong on one of them is raised on all, so that none waits for ever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from thinwire.errors import CorruptCheckpoint, PeerLost, name_ranks
from thinwire.transport.peers import Peers

T = TypeVar("T")

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (CorruptCheckpoint, OSError, ValueError, TypeError, RuntimeError)
}
"""What arrives on other ranks: the first of these that an exception is, or RuntimeError."""

_NAMED = 8
"""So many different complaints are told; the others are counted."""


@dataclass(frozen=True)
class _Failure:
    """What a rank tells the others of an exception."""

    kind: str
    said: str
    errno: int | None = None
    """Of an OSError."""


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


def _describe(error: Exception) -> _Failure:
    kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), None)
    if kind is None:
        return _Failure(RuntimeError.__name__, f"{type(error).__name__}: {error}")
    return _Failure(kind, str(error), error.errno if isinstance(error, OSError) else None)


def _sum_up(outcomes: list[_Failure | None]) -> Exception:
    failures = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome is not None]
    # The same on all ranks, so that a caller who catches it does so on all.
    first = failures[0][1]
    complaints: dict[str, list[int]] = defaultdict(list)
    for rank, failure in failures:
        # Python puts the errno in front of an OSError's text, which need not have it a second time.
        complaints[failure.said.removeprefix(f"[Errno {first.errno}] ")].append(rank)
    if len(complaints) == 1 and len(failures) == len(outcomes):
        (text,) = complaints
    else:
        told = [f"{name_ranks(ranks)}: {said}" for said, ranks in list(complaints.items())[:_NAMED]]
        if len(complaints) > _NAMED:
            told.append(f"and {len(complaints) - _NAMED} more")
        text = "; ".join(told)
    if first.errno is not None:
        return OSError(first.errno, text)  # Python makes it a PermissionError, or whatever the errno stands for
    return _KINDS[first.kind](text)

"""Collective operations: a failure on one rank is raised on all, so that no rank waits for one that has failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from thinwire.errors import CorruptCheckpoint, PeerLost, ReplicasDiffer, name_ranks
from thinwire.transport.peers import Peers

T = TypeVar("T")

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (CorruptCheckpoint, ReplicasDiffer, OSError, ValueError, TypeError, RuntimeError)
}
"""The classes that all ranks raise: the first one that an exception is an instance of, otherwise RuntimeError."""

_MOST_LISTED = 8
"""How many different messages an error lists; it counts the others."""


@dataclass(frozen=True)
class _Failure:
    """The exception of one rank, as it is sent to the others."""

    kind: str
    message: str
    errno: int | None = None
    """Of an OSError."""


def on_all_ranks(peers: Peers, action: Callable[[], T]) -> T:
    """Run `action` on every rank, and return its result once it has succeeded on all of them.

    Raises:
        Exception: on every rank, if `action` failed on any: of the same class on all, with the ranks and their
            messages.
    """
    if peers.size == 1:
        return action()
    try:
        value = action()
    except PeerLost:
        raise  # the other ranks raise it too
    except Exception as error:
        raise _combined(peers.gather(_describe(error))) from error
    outcomes = peers.gather(None)
    if any(outcomes):
        raise _combined(outcomes)
    return value


def on_mesh(replicas: Peers, shards: Peers, action: Callable[[], T]) -> T:
    """As `on_all_ranks`, for all ranks of a mesh, of which each rank knows its row and its column."""
    return on_all_ranks(shards, lambda: on_all_ranks(replicas, action))


def _describe(error: Exception) -> _Failure:
    kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), None)
    if kind is None:
        return _Failure(RuntimeError.__name__, f"{type(error).__name__}: {error}")
    return _Failure(kind, str(error), error.errno if isinstance(error, OSError) else None)


def _combined(outcomes: list[_Failure | None]) -> Exception:
    failures = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome is not None]
    # All ranks raise the class of the first failure, so that a caller who catches it does so on all of them.
    first = failures[0][1]
    ranks_by_message: dict[str, list[int]] = defaultdict(list)
    for rank, failure in failures:
        # Python adds the errno to the text of an OSError. The combined error gets it once.
        ranks_by_message[failure.message.removeprefix(f"[Errno {first.errno}] ")].append(rank)
    if len(ranks_by_message) == 1 and len(failures) == len(outcomes):
        (text,) = ranks_by_message
    else:
        listed = [f"{name_ranks(ranks)}: {message}" for message, ranks in list(ranks_by_message.items())[:_MOST_LISTED]]
        if len(ranks_by_message) > _MOST_LISTED:
            listed.append(f"and {len(ranks_by_message) - _MOST_LISTED} more")
        text = "; ".join(listed)
    if first.errno is not None:
        return OSError(first.errno, text)  # Python chooses the subclass by errno, such as PermissionError
    return _KINDS[first.kind](text)

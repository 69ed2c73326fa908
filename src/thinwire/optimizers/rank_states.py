"""The states of several ranks in one state dict.

With several ranks, an entry under which each rank has its own values is a dict with one tensor per rank::

    state_dict()["state"][0]:  {"v": tensor, "m": {"rank1": tensor}, "step": {"rank1": tensor}, …}

torch.distributed.checkpoint flattens such a dict into keys that contain the rank, so states of different ranks do not
collide, and what all ranks share is saved once. `consolidate_state_dict()` adds the other ranks' tensors to the same
dicts. A rank that loads takes its own tensors.

Numbers of ranks are those of the default group: optimizers of several process groups may be in one checkpoint.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.transport.memory import HOST
from thinwire.transport.peers import Peers
from thinwire.transport.state import State

States = dict[Any, dict[str, Any]]
"""The "state" of a state dict: by parameter, its entries by name."""

_KEY = re.compile(r"rank(0|[1-9][0-9]{0,9})")


def split(states: States, state: State, peers: Peers) -> States:
    """Put the entries that differ between ranks under the rank of this process.

    Args:
        states: by parameter, the entries of this rank.
        state: says which entries differ.
        peers: the ranks of the optimizer.
    """
    key, names = f"rank{_number(peers)}", state.names_of_rank()
    if names:
        names |= {"step"}  # tells whether tensors of several ranks belong together
    # Optimizers of other process groups have other values under the same keys.
    divide_all = peers.group is not None and peers.size < dist.get_world_size()
    return {
        index: {name: {key: value} if divide_all or name in names else value for name, value in entries.items()}
        for index, entries in states.items()
    }


def of_rank(states: States) -> States:
    """From a result of `split`, copies of the entries that are under a rank, on the host."""
    return {
        index: {
            name: {key: value.detach().to(HOST, copy=True).contiguous() for key, value in by_rank.items()}
            for name, by_rank in entries.items()
            if isinstance(by_rank, dict)
        }
        for index, entries in states.items()
    }


def merge(states: States, others: list[States]) -> States:
    """Add the entries of other ranks, as `of_rank` returned them there."""
    return {
        index: {
            name: _sorted({**value, **{k: v for other in others for k, v in other[index][name].items()}})
            if isinstance(value, dict)
            else value
            for name, value in entries.items()
        }
        for index, entries in states.items()
    }


def ranks_in(states: Any) -> list[int]:
    """The ranks that have tensors under all entries that are divided by rank; none if no entry is."""
    found = [_by_rank(value) for value in _values(states)]
    known = [set(by_rank) for by_rank in found if by_rank is not None]
    return sorted(set.intersection(*known)) if known else []


def select(states: Any, ranks: list[int], peers: Peers) -> tuple[Any, list[int]]:
    """The entries for this rank, without the division by rank.

    Args:
        states: the "state" of any state dict.
        ranks: what `ranks_in` returned for it.
        peers: the ranks of the optimizer that loads it.

    Returns:
        The entries; and the rank that they are of, if it is another.
    """
    own = _number(peers)
    if len(ranks) == peers.size:  # complete: by place, because a process group may now have other members
        chosen, others = ranks[peers.rank], []
    elif own in ranks:
        chosen, others = own, []
    else:
        chosen, others = ranks[0], ranks[:1]

    def entry(value: Any) -> Any:
        by_rank = _by_rank(value)
        return value if by_rank is None else by_rank.get(chosen, value)

    return {
        index: {name: entry(value) for name, value in entries.items()} if isinstance(entries, dict) else entries
        for index, entries in states.items()
    }, others


def check_steps(states: Any) -> None:
    """Reject tensors of ranks that were saved at different steps.

    Code that fills a state dict from a checkpoint leaves what the checkpoint lacks as it was.

    Raises:
        ValueError: naming the ranks and their steps.
    """
    steps: dict[int, int] = {}
    for entries in states.values():
        for rank, step in (_by_rank(entries.get("step")) or {}).items() if isinstance(entries, dict) else ():
            if isinstance(step, Tensor) and step.dtype == torch.int64 and step.numel() == 1 and not step.is_meta:
                steps.setdefault(rank, int(step))
    if len(set(steps.values())) > 1:
        listed = ", ".join(f"step {step} of rank {rank}" for rank, step in sorted(steps.items()))
        raise ValueError(
            f"the state dict mixes {listed}: the states of some ranks were not in the checkpoint. Before you save on "
            "one rank, call consolidate_state_dict() on all"
        )


def _values(states: Any) -> list[Any]:
    return [value for entries in states.values() if isinstance(entries, dict) for value in entries.values()]


def _by_rank(value: Any) -> dict[int, Any] | None:
    """The tensors of an entry by rank; None if it is not divided by rank."""
    if not isinstance(value, dict) or not value:
        return None
    matches = [_KEY.fullmatch(key) if isinstance(key, str) else None for key in value]
    if None in matches:
        return None
    return {int(match[1]): each for match, each in zip(matches, value.values(), strict=True) if match is not None}


def _number(peers: Peers) -> int:
    """The rank of this process in the default group."""
    return peers.rank if peers.group is None else peers.ranks()[peers.rank]


def _sorted(by_rank: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(by_rank.items(), key=lambda item: int(item[0].removeprefix("rank"))))

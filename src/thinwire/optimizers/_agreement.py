"""Before anything is sent, all ranks compare what they are about to do.

A disagreement is found on every rank at once, because every rank sees all descriptions and applies the same rule.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from thinwire.wire.exchange import Peers

Description = dict[str, Any]


def require_agreement(peers: Peers, description: Description) -> None:
    """Compare this rank's description, field by field, with everybody's.

    Raises:
        RuntimeError: on every rank, naming the first field that differs, its values, and the ranks that have them.
    """
    everybody: list[Description] = peers.gather(description)
    fields = list(dict.fromkeys(field for one in everybody for field in one))
    for field in fields:
        holders: dict[str, list[int]] = defaultdict(list)
        for rank, one in enumerate(everybody):
            holders[repr(one[field]) if field in one else "missing"].append(rank)
        if len(holders) > 1:
            values = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in holders.items())
            raise RuntimeError(f"ranks disagree on {field}: {values}. It must be the same on all ranks.")


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(map(str, ranks))

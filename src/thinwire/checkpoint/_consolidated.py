"""Loading the states of all ranks from one state dict, on any number of ranks."""

from __future__ import annotations

import json
from typing import Any

from thinwire._unwrap import unwrapped_optimizer
from thinwire.averaging.handle import Compression
from thinwire.checkpoint._mismatch import Nodes, OnMismatch, check_policy, differences_from
from thinwire.optimizers import rank_states, reshard
from thinwire.optimizers.optimizer import WireOptimizer
from thinwire.optimizers.reshard import SavedRun
from thinwire.transport.failures import on_all_ranks


def load_consolidated(target: object, state_dict: dict[str, Any], on_mismatch: OnMismatch) -> bool:
    """See `thinwire.checkpoint.load_state_dict`."""
    wire = target._averager if isinstance(target, Compression) else unwrapped_optimizer(target)
    if not isinstance(wire, WireOptimizer):
        # Raised on this rank alone: the argument is what connects it to the others.
        raise TypeError(
            f"optimizer is {type(target).__module__}.{type(target).__name__}, expected a thinwire optimizer, or the "
            "object that thinwire.compress returned"
        )

    def read() -> reshard.JoinedState | None:
        check_policy(on_mismatch)
        run = _saved_run(state_dict)
        if on_mismatch == "error" or run is None or not differences_from(wire, run.nodes, run.bucket_mb):
            return None
        ranks = rank_states.ranks_in(state_dict["state"])
        if run.size > 1 and len(ranks) != run.size and wire._flat_state.names_of_rank():
            raise ValueError(
                f"the state dict has the states of ranks {ranks}, but on_mismatch={on_mismatch!r} needs those of all "
                f"{run.size}. Save it after consolidate_state_dict(), or with thinwire.checkpoint"
            )
        return reshard.read(wire, run, on_mismatch)

    joined = on_all_ranks(wire._peers, read)
    if joined is None:
        on_all_ranks(wire._peers, lambda: wire.load_state_dict(state_dict))
    else:
        on_all_ranks(wire._peers, lambda: reshard.load(wire, joined))
    return joined is None


def _saved_run(state_dict: Any) -> SavedRun | None:
    """The run that made a state dict; None if it does not say so."""
    try:
        group = state_dict["param_groups"][0]
        nodes: Nodes = tuple(tuple(int(rank) for rank in node) for node in json.loads(group["wire_nodes"]))
        bucket_mb = group["wire_bucket_mb"]
    except (KeyError, IndexError, TypeError, ValueError):
        return None  # load_state_dict() says what is wrong with it
    return SavedRun(nodes, bucket_mb, lambda rank: state_dict)

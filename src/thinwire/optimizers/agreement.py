"""The agreement: before the first exchange, all ranks compare version, settings, parameters and seed.

Every rank receives all descriptions and applies the same rule, so all ranks find the same disagreement.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from thinwire._version import __version__
from thinwire.errors import name_ranks
from thinwire.optimizers import state_dict
from thinwire.optimizers.inputs import checksum
from thinwire.transport.peers import Peers

if TYPE_CHECKING:
    from thinwire.optimizers.optimizer import WireOptimizer

Description = dict[str, Any]


def describe(optimizer: WireOptimizer, names: dict[Tensor, str]) -> Description:
    """Everything on which ranks must agree; `names` are the names of parameters, if they are known."""
    params = list(reversed(optimizer._flat_params))
    description = describe_settings(optimizer)
    for i, p in enumerate(params):
        description[f"parameter {i}"] = (names.get(p, "unnamed"), tuple(p.shape), str(p.dtype), p.stride())
    for i in range(len(params)):
        # Ranks exchange updates, not values: replicas that differ at the start would always differ.
        value = optimizer._rule.agreed_value(len(params) - 1 - i)
        description[f"the checksum of the values of parameter {i}"] = checksum(value)
    if optimizer._step_count > 0:
        for name, tensor in optimizer._rule.compared_state().items():
            description[f"the checksum of {name!r} of the optimizer's state"] = checksum(tensor)
    return description


def describe_settings(optimizer: WireOptimizer) -> Description:
    """Everything on which even ranks with different shards must agree."""
    description: dict[str, Any] = {
        "the optimizer's class": optimizer._title,
        "thinwire's version": __version__,
        "bucket_mb": optimizer._bucket_mb,
        "the number of ranks per node (start as many on each, or use topology='flat')": optimizer._topology.source,
        "the topology": str(optimizer._topology),
        "node_dtype": str(optimizer._node_dtype),
        "max_consecutive_skips": optimizer._skips.most,
        "check_replicas_every": optimizer._replica_check.every,
        "clip_norm": optimizer._clipping.norm,
        "clip_value": optimizer._clipping.value,
        "delay": optimizer._delay.steps,
        **optimizer._settings(),
        "the number of steps taken": int(optimizer._step_count),
        **optimizer._rule.progress(),
        "the number of parameter groups": len(optimizer.param_groups),
        "the number of parameters": len(optimizer._flat_params),
    }
    description.update(group_fields(optimizer.param_groups))
    return description


def group_fields(groups: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """What parameter groups have besides parameters, with descriptions as keys."""
    for i, group in enumerate(groups):
        for key, value in group.items():
            if key not in ("params", "param_names", *state_dict.LABELS):
                yield f"{key} of parameter group {i}", float(value) if isinstance(value, Tensor) else value


def require_agreement(peers: Peers, description: Description) -> str:
    """Compare this rank's description with those of all ranks, field by field.

    Returns:
        A name for the connections: the same on all ranks, and never used before.

    Raises:
        RuntimeError: on every rank, naming the first field that differs, its values, and the ranks that have each.
    """
    answers: list[tuple[str, Description]] = peers.gather(
        (secrets.token_hex(8), description), "the agreement of all ranks"
    )
    raise_first_difference([each for _, each in answers])
    return answers[0][0]


def raise_first_difference(descriptions: Sequence[Description], when: str = "") -> None:
    """Compare the descriptions of all ranks, field by field.

    Raises:
        RuntimeError: naming the first field that differs, its values, and the ranks that have each.
    """
    fields = list(dict.fromkeys(field for each in descriptions for field in each))
    for field in fields:
        require_same(field, [repr(each[field]) if field in each else "missing" for each in descriptions], when)


def require_same(field: str, values: Sequence[str], when: str = "") -> None:
    """Check that all ranks have the same value, given those of all ranks.

    Raises:
        RuntimeError: on every rank, with the values and the ranks that have each.
    """
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        holders[value].append(rank)
    if len(holders) > 1:
        listed = "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in holders.items())
        raise RuntimeError(f"ranks disagree on {field}{when}: {listed}. It must be the same on all ranks.")

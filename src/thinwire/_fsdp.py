"""What `thinwire.attach` and `thinwire.compress` share: the all-reduce of an FSDP2 model over its replicas.

FSDP gathers parameters and reduce-scatters gradients inside a replica. Then it all-reduces each shard of a gradient
over the replicas. `LocalAllReduce` takes the place of that all-reduce and sends nothing. Everything else stays torch's:
how gradients are divided, cast and accumulated, and which backward reduces them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from thinwire._torch_compat import FsdpGroup, LocalAllReduce


def replicate_group(groups: Sequence[FsdpGroup], caller: str) -> ProcessGroup:
    """The replicas of all groups of a model.

    Args:
        groups: the groups.
        caller: the function that is about to replace their all-reduce: "attach" or "compress".

    Raises:
        RuntimeError: if it is replaced already.
        ValueError: if there are no replicas, or groups have different ones.
    """
    found = [group.replicate_group for group in groups]
    replaced = [group.caller for group in found if isinstance(group, LocalAllReduce)]
    if replaced:
        raise RuntimeError(f"{caller}: {_TAKEN[replaced[0]]} Call thinwire.detach(model) first, and call {caller} once")
    first = found[0] if found else None
    if first is None or None in found:
        raise ValueError(
            f"{caller}: the model is sharded over all ranks of its mesh, so there are no replicas whose gradients are "
            "averaged. Expected a mesh with two dimensions, replicas and shards: fully_shard(module, "
            "mesh=init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', 'shard')))"
        )
    members = {tuple(torch.distributed.get_process_group_ranks(group)) for group in found if group is not None}
    if len(members) > 1:
        listed = " and ".join(str(list(ranks)) for ranks in sorted(members))
        raise ValueError(
            f"{caller}: this rank has different replicas for different parameters, on ranks {listed}: expected one "
            "mesh for all modules"
        )
    return first


_TAKEN = {
    "compress": "thinwire.compress averages the gradients of this model already.",
    "attach": "this model is attached to a thinwire optimizer already, which exchanges its gradients.",
}


def check_all_reduce_hooks(groups: Sequence[FsdpGroup], caller: str) -> None:
    """Reject hooks that would get gradients before they are averaged.

    Raises:
        RuntimeError: naming the function that has set the hook.
    """
    if any(group.all_reduce_hook is not None for group in groups):
        raise RuntimeError(
            f"{caller}: the model has an all-reduce hook (set_all_reduce_hook), which would get gradients before they "
            "are averaged. Remove one of the two"
        )


def check_materialized(params: Iterable[Tensor], names: dict[Tensor, str], caller: str) -> None:
    """Reject parameters without memory.

    Raises:
        ValueError: naming the parameter.
    """
    for p in params:
        if p.is_meta:
            raise ValueError(
                f"{caller}: parameter {names[p]!r} is on the meta device: call to_empty() and initialize it first"
            )


def stop_all_reduce(groups: Sequence[FsdpGroup], caller: str, on_all_reduce: Callable[[], None]) -> None:
    """Let FSDP no longer average gradients over the replicas.

    Args:
        groups: the groups of a model, which `replicate_group` has accepted.
        caller: the function that was called: "attach" or "compress".
        on_all_reduce: called whenever FSDP would have averaged. The model references it.
    """
    replaced = groups[0].replicate_group
    assert replaced is not None, "checked before"
    replacement = LocalAllReduce(replaced, caller, on_all_reduce)
    for group in groups:
        group.replicate_group = replacement


def resume_all_reduce(groups: Sequence[FsdpGroup]) -> None:
    """Let FSDP average gradients over the replicas again, after `stop_all_reduce`."""
    for group in groups:
        replacement = group.replicate_group
        assert isinstance(replacement, LocalAllReduce), "set by stop_all_reduce"
        group.replicate_group = replacement.replaced

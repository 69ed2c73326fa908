"""Checkpoints through torch's own `state_dict` and `load_state_dict`, without their casts.

torch casts every loaded state tensor to its parameter's dtype, which would round the fp32 state of bf16 parameters and
break packed words. Its public hooks let us take the tensors out before that happens and copy them, unchanged, into the
state that exists since construction. A rank has a state of its own and saves its own.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.wire.memory import HOST

if TYPE_CHECKING:
    from thinwire.optimizers._base import WireOptimizer

LABELS = ("wire_class", "wire_world_size", "wire_topology", "wire_buckets", "wire_rank", "wire_settings")
"""Entries of every parameter group that tell whose state it is: tools that take state dicts apart and put them together
again (DCP, Accelerate) keep nothing but the groups and the parameters' state."""


def label(optimizer: WireOptimizer, group: dict[str, Any]) -> None:
    """Write into a group whose state it is."""
    peers, topology = optimizer._peers, str(optimizer._topology)
    name, settings = type(optimizer).__name__, optimizer._settings_text()
    values = (name, peers.size, topology, _buckets(optimizer), peers.rank, settings)
    group.update(zip(LABELS, values, strict=True))


def _buckets(optimizer: WireOptimizer) -> str:
    # Slices are cut out of buckets.
    cut = optimizer._state_has_buckets or optimizer._topology.slices > 1
    return f"bucket_mb={optimizer._bucket_mb}" if cut else "any"


def install(optimizer: WireOptimizer) -> None:
    """Register the hooks."""
    optimizer.register_state_dict_pre_hook(_refuse_half_a_step)
    optimizer.register_load_state_dict_pre_hook(_take_out)
    optimizer.register_load_state_dict_post_hook(_copy_in)


def _refuse_half_a_step(registered: Optimizer) -> None:
    optimizer = cast("WireOptimizer", registered)
    optimizer._learn()
    if any(optimizer._encoded):
        raise RuntimeError(
            "state_dict() between backward and step(): gradients of this step have been sent already, and the state is "
            "neither that before it nor that after it. Save after step()"
        )


def _take_out(registered: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    optimizer = cast("WireOptimizer", registered)
    # Everything is checked here, before torch or we change anything.
    groups = [dict(group) for group in state_dict["param_groups"]]
    for group in groups:
        _check_label(optimizer, group)
        label(optimizer, group)
    saved_sizes, sizes = ([len(group["params"]) for group in of] for of in (groups, optimizer.param_groups))
    if saved_sizes != sizes:
        raise ValueError(f"the state dict has parameter groups of {saved_sizes} parameters, this optimizer of {sizes}")
    saved_ids = [saved for group in groups for saved in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    copies: list[tuple[Tensor, Tensor]] = []
    steps: set[int] = set()
    for i, (saved_id, p) in enumerate(zip(saved_ids, params, strict=True)):
        saved, own = state_dict["state"].get(saved_id, {}), optimizer.state.get(p, {})
        if saved.keys() != own.keys():
            raise ValueError(
                f"parameter {i}: the state dict has {sorted(saved)}, this optimizer keeps {sorted(own)}; was it "
                "frozen, or of another dtype, when the state was saved?"
            )
        for name, value in own.items():
            loaded = saved[name] if isinstance(saved[name], Tensor) else torch.as_tensor(saved[name], device=HOST)
            if loaded.shape != value.shape or loaded.dtype != value.dtype:
                raise ValueError(
                    f"parameter {i}: {name!r} is {tuple(loaded.shape)} of {loaded.dtype} in the state dict, this "
                    f"optimizer needs {tuple(value.shape)} of {value.dtype}"
                )
            if name == "step":
                steps.add(int(loaded))
            copies.append((value, loaded))
    if len(steps) > 1:
        raise ValueError(f"the state dict mixes steps {sorted(steps)}: all parameters must come from one checkpoint")
    optimizer._finish_exchange()
    optimizer._loading = (dict(optimizer.state), copies)
    return {"state": {}, "param_groups": groups}


def _check_label(optimizer: WireOptimizer, group: dict[str, Any]) -> None:
    name, size, topology, buckets, rank, settings = (group.get(entry) for entry in LABELS)
    own = type(optimizer).__name__
    peers = optimizer._peers
    if name != own:
        raise ValueError(f"the state dict is of {name or 'another optimizer'}, this is {own}")
    if size != peers.size:
        raise ValueError(
            f"the state dict is of {size} ranks, this run has {peers.size}: each rank has a state of its own, so "
            "resume with as many ranks as were saved"
        )
    if topology != str(optimizer._topology):
        raise ValueError(
            f"the state dict is of topology {topology}, this optimizer has {optimizer._topology}: a rank's state "
            "depends on who is in its node, so resume with the topology that was saved"
        )
    if buckets != _buckets(optimizer):
        raise ValueError(
            f"the state dict is of {buckets}, this optimizer has {_buckets(optimizer)}: what a rank keeps "
            "belongs to shards or slices of buckets, so resume with the bucket_mb that was saved"
        )
    if rank != peers.rank and optimizer._kept.owned:
        raise ValueError(
            f"the state of rank {rank} is loaded on rank {peers.rank}: {own} keeps something for the shards that a "
            "rank owns, and others have other shards. Save and load one state dict a rank, or use thinwire.checkpoint"
        )
    if rank != peers.rank:
        _warn(f"the state of rank {rank} is loaded on rank {peers.rank}: save and load one state dict a rank")
    own_settings = optimizer._settings_text()
    if settings != own_settings:
        _warn(f"the state was saved with {settings}, this optimizer has {own_settings}")


def _warn(what: str) -> None:
    message = f"{what}. Training goes on, but not as if it had never stopped."
    warnings.warn(message, RuntimeWarning, stacklevel=6)


def _copy_in(registered: Optimizer) -> None:
    optimizer = cast("WireOptimizer", registered)
    state, copies = optimizer._loading
    optimizer._loading = ({}, [])
    with torch.no_grad():
        for own, loaded in copies:
            own.copy_(loaded)
    optimizer.state.clear()
    optimizer.state.update(state)
    optimizer._skips.forget()
    optimizer._begin_step()

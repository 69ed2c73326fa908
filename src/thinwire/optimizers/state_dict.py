"""Checkpoints through torch's own `state_dict` and `load_state_dict`, without their casts.

torch casts every loaded state tensor to its parameter's dtype, which would round the fp32 state of bf16 parameters and
break packed words. Its public hooks let us remove the tensors before the cast and copy them, unchanged, into the state
that exists since construction. Each rank has its own state; see `thinwire.optimizers.rank_states`.

Everything is checked before anything is changed: a state dict that is rejected leaves the optimizer unchanged.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire._callers import warn_user
from thinwire._checks import INT64_MAX
from thinwire.optimizers import rank_states
from thinwire.optimizers.clipping import SHARE
from thinwire.optimizers.delay import OUTCOME
from thinwire.optimizers.inputs import make_plain
from thinwire.transport.memory import HOST
from thinwire.transport.state import Tensors

if TYPE_CHECKING:
    from thinwire.optimizers.optimizer import WireOptimizer

LABELS = (
    *("wire_class", "wire_world_size", "wire_topology", "wire_buckets", "wire_rank", "wire_settings"),
    *("wire_nodes", "wire_bucket_mb"),
)
"""Entries of every parameter group that identify its run and rank. They are in the groups because tools that take state
dicts apart and reassemble them (DCP, Accelerate) keep only the groups and the parameters' state."""


_MOST_STEPS = 2**62


def label(optimizer: WireOptimizer, group: dict[str, Any]) -> None:
    """Write the labels of this optimizer into a group."""
    peers, topology = optimizer._peers, _topology(optimizer)
    name, settings = optimizer._title, optimizer._settings_text()
    nodes = json.dumps(optimizer._topology.nodes)
    values = (name, peers.size, topology, _buckets(optimizer), peers.rank, settings, nodes, optimizer._bucket_mb)
    group.update(zip(LABELS, values, strict=True))


def _topology(optimizer: WireOptimizer) -> str:
    sharding, topology = optimizer._sharding, str(optimizer._topology)
    return topology if sharding is None else f"{topology}, {sharding}"


def _buckets(optimizer: WireOptimizer) -> str:
    # Slices are parts of buckets.
    cut = optimizer._rule.state_depends_on_buckets or optimizer._topology.slices > 1
    block = optimizer._rule.scale_block
    blocks = "" if block is None else f", scale_block={block}"
    return f"bucket_mb={optimizer._bucket_mb}{blocks}" if cut else "any"


def install(optimizer: WireOptimizer) -> None:
    """Register the hooks."""
    optimizer.register_state_dict_pre_hook(check_saveable)
    optimizer.register_load_state_dict_pre_hook(_before_load)
    optimizer.register_load_state_dict_post_hook(_after_load)


# What users see -------------------------------------------------------------------------------------------------------


def expose(optimizer: WireOptimizer) -> None:
    """Expose the state of each parameter in `optimizer.state`."""
    for position, kept in enumerate(optimizer._state_of):
        if position == len(optimizer._shown_of):
            optimizer._shown_of.append({})
        shown = optimizer._shown_of[position]
        for name, tensor in kept.items():
            if name not in shown or not _same_memory(shown[name], tensor):
                shown[name] = tensor.detach()
    optimizer.state = defaultdict(dict, zip(optimizer._flat_params, map(dict, optimizer._shown_of), strict=True))
    optimizer._all_shown = [tensor for shown in optimizer._shown_of for tensor in shown.values()]


def check_unchanged(optimizer: WireOptimizer, *, thoroughly: bool = False) -> None:
    """Reject a change of the entries of `optimizer.state`, because the optimizer does not read them.

    Args:
        optimizer: the optimizer.
        thoroughly: whether to compare the memory of the tensors as well as their identity.

    Raises:
        RuntimeError: naming the first parameter and entry, and what to do instead.
    """
    state = optimizer.state
    if not isinstance(state, dict) or len(state) != len(optimizer._flat_params):
        raise _changed(optimizer, f"it has {len(state) if isinstance(state, dict) else type(state).__name__} entries")
    if not thoroughly and _is_as_exposed(optimizer, state):
        return
    for position, (p, shown) in enumerate(zip(optimizer._flat_params, optimizer._shown_of, strict=True)):
        entries = state.get(p)
        if not isinstance(entries, dict) or len(entries) != len(shown):
            raise _changed(optimizer, f"parameter {optimizer._session.layout.slots[position].index} has other entries")
        if not all(map(operator.is_, entries.values(), shown.values())) or (
            thoroughly and not all(map(_same_memory, shown.values(), optimizer._state_of[position].values()))
        ):
            _check_entries(optimizer, position, entries)


def _is_as_exposed(optimizer: WireOptimizer, state: dict[Any, Any]) -> bool:
    """Whether the state is obviously unchanged. It looks at objects' identities only, which takes loops in C and does
    not fetch the objects."""
    if not all(map(operator.is_, state, optimizer._flat_params)) or set(map(type, state.values())) != {dict}:
        return False
    lengths, shown = list(map(len, state.values())), optimizer._all_shown
    if lengths != list(map(len, optimizer._shown_of)):
        return False
    return all(map(operator.is_, itertools.chain.from_iterable(map(dict.values, state.values())), shown))


def _same_memory(shown: Tensor, kept: Tensor) -> bool:
    return shown.data_ptr() == kept.data_ptr() and shown.dtype == kept.dtype and shown.shape == kept.shape


def _check_entries(optimizer: WireOptimizer, position: int, entries: dict[str, Any]) -> None:
    shown, kept = optimizer._shown_of[position], optimizer._state_of[position]
    changed = [
        name for name in kept if entries.get(name) is not shown[name] or not _same_memory(shown[name], kept[name])
    ]
    if changed:  # otherwise only their order has changed
        index = optimizer._session.layout.slots[position].index
        raise _changed(optimizer, f"{', '.join(map(repr, changed))} of parameter {index}")


def _changed(optimizer: WireOptimizer, what: str) -> RuntimeError:
    return RuntimeError(
        f"optimizer.state was changed: {what}. {type(optimizer).__name__} does not read its entries, so the change "
        "would have no effect. Write into its tensors in place, as in optimizer.state[p]['m'].zero_(); use "
        "load_state_dict(); or make a new optimizer to start from zero"
    )


def check_saveable(registered: Optimizer) -> None:
    """Check that the state is that of a whole number of steps.

    Raises:
        RuntimeError: while an exchange is under way, or if the user has replaced entries of the state.
    """
    optimizer = cast("WireOptimizer", registered)
    optimizer._follow_parameters()
    optimizer._complete()
    optimizer._read_outcomes()
    if any(optimizer._session.encoded):
        raise RuntimeError(
            f"state_dict() {optimizer._exchange_time}: gradients of this step have already been sent, and the state is "
            "neither the one before the step nor the one after it. Save after step()"
        )
    check_unchanged(optimizer, thoroughly=True)
    for group in optimizer.param_groups:
        make_plain(group)


# Loading --------------------------------------------------------------------------------------------------------------


def check(optimizer: WireOptimizer, state_dict: dict[str, Any]) -> None:
    """Run all checks of `load_state_dict`, warnings included, and change nothing.

    Raises:
        TypeError: if it is not a dict.
        ValueError: if it is not the state dict of such an optimizer, or has values that no run can have saved.
    """
    _plan(optimizer, state_dict)


def _before_load(registered: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    optimizer = cast("WireOptimizer", registered)
    groups, copies = _plan(optimizer, state_dict)
    optimizer._finish_exchange()
    optimizer._begin_step()  # if another hook raises now, the next step must not apply what was exchanged for nothing
    optimizer._loading = copies
    return {"state": {}, "param_groups": groups}


def _after_load(registered: Optimizer) -> None:
    optimizer = cast("WireOptimizer", registered)
    copies, optimizer._loading = optimizer._loading, []
    with torch.no_grad():
        for own, loaded in copies:
            own.copy_(loaded)
    optimizer._delay.in_flight = False
    expose(optimizer)
    optimizer._skips.reset()
    optimizer._begin_step()
    # Packets depend on the loaded state, and another rank may have loaded a different one, or none: agree again.
    optimizer._disconnect()


def _plan(
    optimizer: WireOptimizer, state_dict: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[tuple[Tensor, Tensor]]]:
    """The groups to load, and pairs of a state tensor and the tensor to copy into it."""
    optimizer._follow_parameters()
    saved_states, groups = _checked_parts(state_dict)
    if not groups:
        raise ValueError("the state dict has no parameter groups")
    saved_sizes, sizes = ([len(group["params"]) for group in of] for of in (groups, optimizer.param_groups))
    for group in groups:
        _check_label(optimizer, group)
    if optimizer._sharding is not None:
        saved_states = optimizer._sharding.unwrap(saved_states)
    ranks = rank_states.ranks_in(saved_states)
    if ranks:
        rank_states.check_steps(saved_states)
        states, others = rank_states.select(saved_states, ranks, optimizer._peers)
    else:
        states, labels = saved_states, [group.get("wire_rank") for group in groups]
        others = [rank for rank in labels if rank != optimizer._peers.rank]
    _check_rank(optimizer, others)
    _check_delay(optimizer, states)
    _check_settings(optimizer, groups[0])
    if saved_sizes != sizes:
        raise ValueError(
            f"the state dict has parameter groups of {saved_sizes} parameters, this {optimizer._noun} of {sizes}"
        )
    for i, group in enumerate(groups):
        _check_group(optimizer, i, group)
        label(optimizer, group)
    kept_of = dict(zip(optimizer._flat_params, optimizer._state_of, strict=True))
    copies: list[tuple[Tensor, Tensor]] = []
    small: dict[str, list[Tensor]] = {}
    saved_ids = [saved for group in groups for saved in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, (saved_id, p) in enumerate(zip(saved_ids, params, strict=True)):
        for name, (own, loaded) in _pairs(optimizer, i, states.get(saved_id, {}), kept_of.get(p, {})).items():
            copies.append((own, loaded))
            if name == "step" or name in optimizer._flat_state.checks:
                small.setdefault(name, []).append(loaded)
    _check_small(optimizer, small)
    return groups, copies


def _checked_parts(state_dict: dict[str, Any]) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    if not isinstance(state_dict, dict):
        raise TypeError(f"state_dict is {type(state_dict).__name__}, expected a dict, as state_dict() returns it")
    states, groups = state_dict.get("state"), state_dict.get("param_groups")
    if not isinstance(states, dict) or not isinstance(groups, (list, tuple)):
        raise ValueError(f"the state dict has {sorted(map(str, state_dict))}: expected 'state' and 'param_groups'")
    for group in groups:
        if not isinstance(group, dict) or not isinstance(group.get("params"), (list, tuple)):
            raise ValueError("a parameter group of the state dict is not a dict with a list of 'params'")
        if not all(isinstance(saved, (int, str)) for saved in group["params"]):
            raise ValueError(
                "a parameter group of the state dict identifies parameters by something other than numbers or names"
            )
    # Copied here, because copying may fail: torch would copy them only after the current exchange was discarded.
    return states, [copy.deepcopy(group) for group in groups]


def _check_label(optimizer: WireOptimizer, group: dict[str, Any]) -> None:
    name, size, topology, buckets = (group.get(entry) for entry in LABELS[:4])
    own, this, peers = optimizer._title, f"this {optimizer._noun}", optimizer._peers
    if name != own:
        raise ValueError(f"the state dict is of {name or 'another optimizer'}, this is {own}")
    sharded = optimizer._sharding is not None or "shards" in str(topology)
    if size != peers.size and not sharded:
        raise ValueError(
            f"the state dict is of {size} ranks, this run has {peers.size}: each rank has its own state, so "
            "resume with as many ranks as were saved, or combine the states of all ranks with "
            "thinwire.checkpoint.load_state_dict(..., on_mismatch='average')"
        )
    if topology != _topology(optimizer):
        raise ValueError(
            f"the state dict is of topology {topology}, {this} has {_topology(optimizer)}: a rank's state "
            "depends on the ranks of its node and on its shards, so resume with the topology and the mesh that were "
            "saved"
        )
    if buckets != _buckets(optimizer):
        raise ValueError(
            f"the state dict is of {buckets}, {this} has {_buckets(optimizer)}: a rank's state "
            "belongs to shards or slices of buckets, so resume with the bucket_mb that was saved, and its scale_block"
        )


def _check_delay(optimizer: WireOptimizer, states: Any) -> None:
    saved = any(isinstance(entries, dict) and OUTCOME in entries for entries in states.values())
    if saved != bool(optimizer._delay.steps) and optimizer._flat_params:
        raise ValueError(
            f"the state dict is of delay={int(saved)}, this {optimizer._noun} has delay={optimizer._delay.steps}: with "
            "a delay the state has the answer that the next step applies. Resume with the delay that was saved"
        )


def _check_settings(optimizer: WireOptimizer, group: dict[str, Any]) -> None:
    settings, own = group.get("wire_settings"), optimizer._settings_text()
    if settings != own:
        _warn(f"the state was saved with {settings}, this {optimizer._noun} has {own}")


def _check_rank(optimizer: WireOptimizer, others: Sequence[object]) -> None:
    """Reject the state of other ranks, or warn if it can be used."""
    state, own = optimizer._flat_state, optimizer._peers.rank
    if not others or not state.names_of_rank():
        return
    other = others[0]
    advice = (
        "call consolidate_state_dict() on all ranks before one of them saves, or let each rank save and load its own, "
        "with thinwire.checkpoint or torch.distributed.checkpoint"
    )
    if state.owned:
        raise ValueError(
            f"the state of rank {other} is loaded on rank {own}: {optimizer._title} keeps state for the shards that a "
            f"rank owns, and each rank owns different shards. To save a state that every rank can load, {advice}"
        )
    _warn(f"the state of rank {other} is loaded on rank {own}: {advice}")


def _warn(what: str) -> None:
    warn_user(f"{what}. Training continues, but not as if it had never stopped.")


def _check_group(optimizer: WireOptimizer, i: int, group: dict[str, Any]) -> None:
    """Reject hyper-parameters that the constructor would reject."""
    make_plain(group)
    missing = sorted(optimizer._hyperparameters - group.keys())
    if missing:
        raise ValueError(f"parameter group {i} of the state dict lacks {', '.join(map(repr, missing))}")
    try:
        optimizer._rule.check_group(group)
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:  # of another type, or out of range
        raise ValueError(f"parameter group {i} of the state dict: {error}") from error


def _pairs(optimizer: WireOptimizer, i: int, saved: Any, kept: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
    """For each state entry of a parameter, the tensor that is kept and the tensor to copy into it."""
    # A run may be resumed with or without clip_norm, after a warning about its settings.
    if not isinstance(saved, dict) or (saved.keys() ^ kept.keys()) - {SHARE}:
        asked = (
            "Was the parameter frozen, or of another dtype, when the state was saved?"
            if optimizer._rule.moves_parameters
            else "Was the state saved with another compressor?"
        )
        raise ValueError(
            f"parameter {i}: the state dict has {sorted(map(str, saved))}, this {optimizer._noun} keeps {sorted(kept)}."
            f" {asked}"
        )
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, own in kept.items():
        if name not in saved:
            continue
        value = saved[name]
        if (
            isinstance(value, (int, float))
            and -INT64_MAX <= value <= INT64_MAX
            and (own.is_floating_point() or value == int(value))
        ):
            value = torch.tensor(value, device=HOST).to(own.dtype)  # some tools save counters as numbers
        if not isinstance(value, Tensor):
            raise ValueError(f"parameter {i}: {name!r} is {value!r:.40} in the state dict, expected a tensor")
        if value.shape != own.shape or value.dtype != own.dtype:
            raise ValueError(
                f"parameter {i}: {name!r} is {tuple(value.shape)} of {value.dtype} in the state dict, this "
                f"{optimizer._noun} needs {tuple(own.shape)} of {own.dtype}"
            )
        if value.layout != torch.strided or value.device.type == "meta":
            raise ValueError(
                f"parameter {i}: {name!r} is {value.layout} on {value.device} in the state dict, expected a dense "
                "tensor with values"
            )
        if value.is_floating_point() and not math.isfinite(float(value.sum(dtype=torch.float64))):
            raise ValueError(f"parameter {i}: {name!r} in the state dict has values that are not finite")
        pairs[name] = own, value
    return pairs


def _check_small(optimizer: WireOptimizer, small: dict[str, list[Tensor]]) -> None:
    """Reject counters and flags that no run can have, because later steps depend on them."""
    steps = {int(step) for step in small.get("step", [])}
    if len(steps) > 1:
        raise ValueError(f"the state dict mixes steps {sorted(steps)}: all parameters must come from one checkpoint")
    step = steps.pop() if steps else 0
    if not 0 <= step <= _MOST_STEPS:
        raise ValueError(f"the state dict is of step {step}: expected 0 to 2**62")
    for name, check_values in optimizer._flat_state.checks.items():
        for tensor in small.get(name, []):
            complaint = check_values(tensor, step)
            if complaint is not None:
                raise ValueError(f"{name!r} in the state dict {complaint}: {_truncated(tensor.tolist())}")
    for name in optimizer._flat_state.common.keys() & small.keys():
        first = small[name][0]
        if not all(torch.equal(first, other) for other in small[name]):
            raise ValueError(f"{name!r} in the state dict differs between parameters, but must be the same for all")


def _truncated(values: Sequence[float] | float) -> str:
    shown = repr(values)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"

"""Every private name of torch that thinwire uses, with the reason for each.

No other module of thinwire may use a private or undocumented attribute of torch; tests/unit/test_torch_compat.py checks
it. A new release of torch can change any of these names, so this is the first file to read when a test fails with a new
torch. "Since" gives the oldest supported release that has the name. Most say 2.6: torch 2.6.0, the oldest release that
the package metadata allows, and 2.13.0, the release that tests use, both have it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, ProcessGroup
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary as TensorDictionary

__all__ = ["TensorDictionary"]
"""A dictionary with tensors as keys, by identity, which keeps none of them alive.

`weakref.WeakKeyDictionary` compares keys with `==`, which tensors do not support. An attribute of a parameter would be
pickled with it. Undocumented; since 2.6.
"""

# DistributedDataParallel ----------------------------------------------------------------------------------------------


def communication_hooks(model: DistributedDataParallel) -> list[tuple[str, Any]]:
    """The names of the communication hooks that a model has, and their states.

    DDP accepts one hook only. Without this list `attach` learns of an earlier hook from an exception of
    `register_comm_hook`, after ranks have already exchanged their settings. A copy of a model has the list of the
    original, but DDP does not register the hooks. Since 2.6.
    """
    return [(getattr(hook, "__name__", type(hook).__name__), state) for hook, state in model._comm_hooks]


def forget_communication_hooks(model: DistributedDataParallel) -> None:
    """Clear the list of hooks of a copied model, none of which DDP has registered. Since 2.6."""
    model._comm_hooks.clear()


def disable_static_graph_all_reduce(model: DistributedDataParallel) -> None:
    """Stop DDP from exchanging all gradients at the end of the first backward of a static graph.

    With `static_graph=True` the first backward enqueues this exchange unless the flag says that it was enqueued. It
    ignores `no_sync()`. Without this call the first backward of an attached model with a static graph fails with an
    internal assertion of DDP's reducer. Since 2.6.
    """
    model._static_graph_delay_allreduce_enqueued = True


def synchronizes_gradients(model: DistributedDataParallel) -> bool:
    """Whether the next backward exchanges gradients: False inside `no_sync()`. Undocumented; since 2.6."""
    return model.require_backward_grad_sync


def set_gradient_synchronization(model: DistributedDataParallel, *, enabled: bool) -> None:
    """Turn the exchange of gradients on or off, as `no_sync()` does.

    `attach` and `compress` turn it off during forward: DDP then prepares no bucket for the backward that follows.
    Without it DDP sends dense gradients beside thinwire's packets. Undocumented; since 2.6.
    """
    model.require_backward_grad_sync = enabled


def synchronized_last(model: DistributedDataParallel) -> bool:
    """Whether the last forward prepared an exchange of gradients; True before the first one.

    `LocalSteps` runs after backward, when `no_sync()` has ended: the flag of `synchronizes_gradients` is set again.
    Without it, models under `no_sync()` would be refused. Undocumented; since 2.6.
    """
    return model.require_forward_param_sync


def set_buffer_synchronization(model: DistributedDataParallel, *, enabled: bool) -> None:
    """Choose whether the next forward broadcasts the buffers of rank 0.

    DDP sets this flag after each forward whose backward synchronizes. `attach` and `compress` hide that from DDP and
    must set the flag themselves; otherwise buffers, such as the statistics of BatchNorm, diverge. Undocumented; since
    2.6.
    """
    model.require_forward_param_sync = enabled


# GradScaler -----------------------------------------------------------------------------------------------------------

_OptimizerClass = TypeVar("_OptimizerClass", bound=type[torch.optim.Optimizer])


def unscales_in_step(optimizer_class: _OptimizerClass) -> _OptimizerClass:
    """Class decorator: `GradScaler.step` calls `step()` in every case and passes the scale and the overflow flag.

    Without it each rank's GradScaler decides alone whether to call `step()`. A rank that skips its step leaves the
    other ranks waiting for its packets. Since 2.6.
    """
    optimizer_class._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return optimizer_class


def scale_passed_to_step(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The scale of the loss that GradScaler passes to the `step()` under way.

    None without a GradScaler, and after `unscale_()`. Without it `step()` would use scaled gradients. Undocumented;
    since 2.6.
    """
    return getattr(optimizer, "grad_scale", None)


def is_called_by_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the `step()` under way was called by a GradScaler.

    `attach` uses it to reject a GradScaler that it was not given. Undocumented; since 2.6.
    """
    return hasattr(optimizer, "found_inf")


def current_scale(scaler: torch.amp.GradScaler) -> Tensor | None:
    """The scale of the loss, on its device; None before the first `scale()`.

    `GradScaler.get_scale()` copies it to the host, which would block the GPU for each gradient. Since 2.6.
    """
    return scaler._scale


def overflow_flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The flags, one per device, from which `GradScaler.update()` decides whether to lower the scale.

    A scaler checks the gradients of its own rank only. `attach` sets the flags when any rank has overflowed; otherwise
    the scales of ranks diverge. Since 2.6.
    """
    return list(scaler._found_inf_per_device(optimizer).values())


# Process groups -------------------------------------------------------------------------------------------------------


def backends(group: ProcessGroup) -> dict[str, Any]:
    """The backend that a group uses for each type of device, such as "cpu".

    torch has no public function for the backend objects, which alone can be aborted and shut down. Since 2.6.
    """
    return {device.type: group._get_backend(device) for device in group._device_types}


def group_timeout(group: ProcessGroup) -> timedelta | None:
    """How long members of a group wait for each other; None if no backend of the group states it.

    `new_group()` does not take over the timeout that the user gave to `init_process_group()`. Without this function
    thinwire's own groups would wait for torch's default of many minutes. Since 2.6.
    """
    for backend in backends(group).values():
        try:
            return backend.options._timeout
        except (RuntimeError, AttributeError):  # not every backend has options
            continue
    return None


def connect_group(
    name: str,
    ranks: Sequence[int],
    own: int,
    backend: str,
    device: torch.device,
    timeout: timedelta | None,
    description: str,
    store: dist.Store | None = None,
) -> ProcessGroup:
    """Make a process group of some ranks that torch.distributed does not register. All members call it.

    `torch.distributed.new_group()` must be called by every rank of the default group, in the same order, and it keeps
    the group until the process ends. A thinwire optimizer makes its groups when it is first used, for its own ranks
    only, and releases them when it is closed. Since 2.6, which made this constructor of ProcessGroup.

    Args:
        name: the same on all members, and never used before.
        ranks: of the members in the default group, or in the run that has the store.
        own: the position of this rank among them.
        backend: "gloo" or "nccl".
        device: the kind of device that the group serves.
        timeout: how long members wait for each other; None for the backend's default.
        description: stored in the group as `group_desc`.
        store: in which the members find each other; None for that of the default group.
    """
    store = PrefixStore(name, store or _get_default_store())
    group = ProcessGroup(store, own, len(ranks))
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        if timeout is not None:
            options._timeout = timeout
        options.global_ranks_in_group = list(ranks)
        kind, made = ProcessGroup.BackendType.NCCL, dist.ProcessGroupNCCL(store, own, len(ranks), options)
    else:
        waits = {} if timeout is None else {"timeout": timeout}
        kind, made = ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, own, len(ranks), **waits)
    made._set_sequence_number_for_group()
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, made)
    group._set_group_desc(description)
    return group


def all_gather(group: ProcessGroup, gathered: Tensor, own: Tensor) -> dist.Work | None:
    """Send a tensor to all members and receive theirs, one after another, into a larger one.

    The public function is called `all_gather_into_tensor` up to torch 2.12 and `all_gather_single` from 2.13, where
    the older name warns. This method of the group has the same name in all of them. Since 2.6.
    """
    return group._allgather_base(gathered, own)


def all_to_all(group: ProcessGroup, received: Tensor, sent: Tensor) -> dist.Work | None:
    """Send an equal part of a tensor to each member and receive one part from each.

    Like `torch.distributed.all_to_all_single`, which accepts only groups that torch.distributed has registered.
    Undocumented; since 2.6.
    """
    return group.alltoall_base(received, sent, [], [])


ALL_GATHER_METHOD = "_allgather_base"
"""The method behind `all_gather`, by name: `thinwire selftest` wraps it to count bytes."""


class PythonProcessGroup(ProcessGroup):
    """A process group for CPU tensors that is written in Python and is its own backend.

    ProcessGroup has a constructor without a store, which its type stubs omit. Subclasses implement what they need of
    the backend: `name`, `abort`, `send`, `recv`. Since 2.6.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self


# fully_shard (FSDP2) --------------------------------------------------------------------------------------------------


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module.

    Only a program that has imported torch.distributed.fsdp has such modules. Importing it here would add half a second
    to the import of thinwire. Since 2.6.
    """
    kind = fully_sharded_class()
    return kind is not None and isinstance(model, kind)


def fully_sharded_class() -> type | None:
    """The class of modules to which `fully_shard` was applied, if the program has any. See `is_fully_sharded`."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return None if fsdp is None else fsdp.FSDPModule


class FsdpGroup:
    """The parameters that one call of `fully_shard` communicates together.

    torch has no public way to list the groups of a model, their parameters or their process groups. Since 2.6.

    Args:
        group: torch's own object.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    @classmethod
    def all_of(cls, model: nn.Module) -> list[FsdpGroup]:
        """The groups of a model, in the order of `model.modules()`: the root first. Backward ends with the root.

        A module has one group in older releases. In 2.13 it has one for each mesh of its parameters.
        """
        found: dict[Any, None] = {}
        for module in model.modules():
            if is_fully_sharded(module):
                state = module._get_fsdp_state()  # type: ignore[operator]
                if hasattr(state, "_fsdp_param_groups"):
                    found.update(dict.fromkeys(state._fsdp_param_groups))
                elif state._fsdp_param_group is not None:
                    found[state._fsdp_param_group] = None
        return [cls(group) for group in found]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters, which are DTensors."""
        return [each.sharded_param for each in self._group.fsdp_params]

    @property
    def replicate_group(self) -> ProcessGroup | None:
        """The ranks that hold the same shards; None on a mesh without a replicate dimension."""
        return getattr(self._group.mesh_info, "replicate_process_group", None)

    @replicate_group.setter
    def replicate_group(self, group: ProcessGroup) -> None:
        """Let FSDP call another process group to reduce the shards of gradients over the replicas.

        `FSDPModule.set_all_reduce_hook` does not replace this reduction: the hook runs after it.
        """
        self._group.mesh_info.replicate_process_group = group

    @property
    def shard_group(self) -> ProcessGroup | None:
        """The ranks that hold the other shards of the same replica; None on a mesh without a shard dimension."""
        return getattr(self._group.mesh_info, "shard_process_group", None)

    @property
    def all_reduce_hook(self) -> Any:
        """What the user gave to `FSDPModule.set_all_reduce_hook`, which has no counterpart that reads; or None."""
        return getattr(self._group, "_all_reduce_hook", None)


class LocalAllReduce(PythonProcessGroup):
    """A process group whose all-reduce communicates nothing, because another exchange averages the result later.

    `fully_shard` calls it instead of its replicate group. It has the rank and the size of that group, from which
    `fully_shard` computes the factors that divide gradients. A sum is replaced by `size` times the local value, so that
    the average over the ranks, taken later, is the sum. Since 2.6.

    Args:
        replaced: the group that it replaces.
        caller: the function that replaces it: "attach" or "compress".
        on_all_reduce: called before each all-reduce.
    """

    def __init__(self, replaced: ProcessGroup, caller: str, on_all_reduce: Callable[[], None]) -> None:
        super().__init__(replaced.rank(), replaced.size())
        self.replaced = replaced
        self.caller = caller
        self._on_all_reduce = on_all_reduce

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> None:  # type: ignore[override]
        """Called by `torch.distributed.all_reduce`, which accepts None for work that is done."""
        self._on_all_reduce()
        if opts.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self.size())
        elif opts.reduceOp != dist.ReduceOp.AVG:
            raise NotImplementedError(f"all_reduce with {opts.reduceOp}: expected SUM or AVG")


def post_accumulate_hooks(p: Tensor) -> list[Any]:
    """The hooks that `register_post_accumulate_grad_hook` has registered on a parameter. Since 2.6."""
    return list((getattr(p, "_post_accumulate_grad_hooks", None) or {}).values())


def post_accumulate_hook_count(p: Tensor) -> int:
    """The number of hooks that `post_accumulate_hooks` lists."""
    return len(getattr(p, "_post_accumulate_grad_hooks", None) or ())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call a function when the backward pass under way ends, after what was queued before it.

    torch has no public function for this; DDP and FSDP use this one. Since 2.6.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# Fully sharded data parallelism, version 1 ----------------------------------------------------------------------------


def uses_fsdp1(model: nn.Module) -> bool:
    """Whether a module or a part of it is a FullyShardedDataParallel.

    Only a program that has imported torch.distributed.fsdp has such modules. Since 2.6.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in model.modules())


def is_of_fsdp1(p: Tensor) -> bool:
    """Whether a parameter belongs to FullyShardedDataParallel: a FlatParameter, or a part of one.

    With `use_orig_params=True` the parameters are ordinary ones, which FSDP marks. Without this check an optimizer
    would exchange shards that are not of the same parameter. Since 2.6.
    """
    return getattr(p, "_is_flat_param", False) is True or getattr(p, "_fsdp_flattened", False) is True


# Tensors --------------------------------------------------------------------------------------------------------------


def write_count(tensor: Tensor) -> int:
    """How often a tensor has been written to in place. Not available for inference tensors.

    Caches of values derived from a tensor compare it to notice changes. Without it they would be recomputed for every
    kernel call. Since 2.6.
    """
    return tensor._version


def is_zero_without_memory(tensor: Tensor) -> bool:
    """Whether a tensor is a ZeroTensor, which autograd uses for gradients known to be zero.

    It has no memory; a kernel that read its address would crash. Since 2.6.
    """
    return tensor._is_zerotensor()


# Modules --------------------------------------------------------------------------------------------------------------


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given, or the module itself.

    Names of parameters in `state_dict()` must not depend on whether the model was compiled. Since 2.6.
    """
    original = getattr(module, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else module


def own_tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dictionaries in which a module keeps its own parameters and buffers, those of its children excluded.

    `named_parameters()` and `named_buffers()` leave out entries that are None and cannot be written to. A failed
    `checkpoint.load` needs both to restore a module. Since 2.6.
    """
    return module._parameters, module._buffers


def loads_state_by_default(module: nn.Module) -> bool:
    """Whether `load_state_dict` of a module and its children is torch's own, without hooks.

    Only then does `checkpoint.load` know which entries a state dict must have. Without it, a module that renames
    entries while it loads would be refused. Since 2.6.
    """
    return type(module).load_state_dict is nn.Module.load_state_dict and not any(
        part._load_state_dict_pre_hooks
        or part._load_state_dict_post_hooks
        or not type(part)._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        for part in module.modules()
    )


# Serialization --------------------------------------------------------------------------------------------------------


def load_streamed(stream: Any) -> Any:
    """Read what torchft has written to a socket with torch's streaming serialization: tensors and plain values only.

    torchft itself lets pickle execute what the stream says. Undocumented; since 2.7.
    """
    from torch.distributed._serialization import _streaming_load

    with warnings.catch_warnings():
        # The tensors are views of what was read, and nothing writes to it.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return _streaming_load(stream, weights_only=True)


# Imports --------------------------------------------------------------------------------------------------------------

IMPORTED_BY_OPTIMIZERS = "torch._dynamo"
"""The module that the first torch optimizer of a process imports, which takes over a second. A process that forks
workers imports it first. Since 2.6."""

"""`thinwire.attach`: let an optimizer exchange the gradients of a DistributedDataParallel or FSDP2 model.

`thinwire.attachments` has what is registered in each of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire._first_use import cancel
from thinwire._torch_compat import is_fully_sharded
from thinwire._unwrap import distributed_model, refuse_fsdp1, unwrapped_optimizer
from thinwire.attachments.ddp import attach_ddp, attach_when_used
from thinwire.attachments.fsdp import attach_fsdp
from thinwire.optimizers.optimizer import WireOptimizer


def attach(
    model: nn.Module,
    optimizer: Any,
    *,
    overlap: bool = True,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Let a thinwire optimizer do the communication of a DistributedDataParallel or FSDP2 model. All ranks call it.

    DDP no longer averages gradients; the optimizer exchanges packets while backward runs. Results are equal, to the
    bit, to those of the same optimizer without `attach` on a module without DDP.

    A module that is not wrapped yet may be given instead, for frameworks that wrap it themselves. `attach` then takes
    effect in the first forward, with gradients, of a DistributedDataParallel model that wraps the module or contains
    it; what does not fit is refused there. If nothing ever wraps it, `step()` exchanges by itself.

    `no_sync()` accumulates gradients as before. Gradients are sent as backward produces them. A change of `.grad`
    between backward and `step()`, such as `clip_grad_norm_`, would have no effect, so `step()` raises GradientChanged:
    use `clip_norm=` or `clip_value=` of the optimizer, or `overlap=False`. `GradScaler.unscale_` is no such change.
    DDP still sends buffers in forward. If a rank is lost there, torch raises the error, not thinwire.

    With FSDP2 (`fully_shard`) on a mesh of replicas and shards, the optimizer is made with `mesh=`, and `model` is the
    root module. FSDP no longer averages gradients over the replicas, each of which is a worker; shards stay torch's
    business. Example::

        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        opt = thinwire.Birder(net.parameters(), lr=1e-3, mesh=mesh)
        thinwire.attach(net, opt)

    No other optimizer may move the parameters: its `step()` raises RuntimeError. `thinwire.detach` ends it all.

    Args:
        model: a DistributedDataParallel model, or a module that will be wrapped in one, or the root module of a model
            after `fully_shard`; also inside the wrapper of a framework or of torch.compile. The optimizer holds all of
            its trainable parameters.
        optimizer: a thinwire optimizer, also inside the wrapper of a framework.
        overlap: exchange during backward; otherwise in `step()`, which then sends `.grad` as it is, clipped or not.
        grad_scaler: the torch.amp.GradScaler in use, if any. Gradients are encoded during backward, before
            `scaler.step()` could unscale them. An overflow on one rank then lowers the scale on all ranks.

    Raises:
        TypeError: if the model is not a module, or is of FSDP1, or is sharded and the optimizer was made without
            `mesh=`; or if the optimizer is not thinwire's.
        ValueError: if the optimizer does not fit the model.
        ValueError: on every rank, if the nodes are unknown or have different numbers of ranks.
        RuntimeError: if the model has a communication hook or an all-reduce hook already; or, on every rank, if ranks
            differ in the optimizer's class, its hyper-parameters, the parameters' names, shapes or dtypes, the version
            or the seed.
    """
    inner, wire = distributed_model(model), unwrapped_optimizer(optimizer)
    if not isinstance(wire, WireOptimizer):
        raise TypeError(
            f"attach: optimizer is {type(wire).__module__}.{type(wire).__name__}, expected a thinwire optimizer, for "
            "example thinwire.Birder"
        )
    _check_model(inner, wire)
    if isinstance(inner, DistributedDataParallel):
        cancel(inner.module)
        attach_ddp(inner, wire, grad_scaler, overlap=overlap)
    elif is_fully_sharded(inner):
        attach_fsdp(inner, wire, grad_scaler, overlap=overlap)
    else:
        attach_when_used(inner, wire, grad_scaler, overlap=overlap)


def _check_model(model: object, optimizer: WireOptimizer) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"attach: model is {type(model).__name__}, expected torch.nn.parallel.DistributedDataParallel, or the "
            "torch.nn.Module that it will wrap"
        )
    refuse_fsdp1(model, "attach")
    sharded = [name for name, part in model.named_modules() if is_fully_sharded(part)]
    if sharded and optimizer._sharding is None:
        raise TypeError(
            f"attach: the model is sharded by fully_shard (FSDP2), but the {type(optimizer).__name__} is not made for "
            "shards. After fully_shard, on a mesh of replicas and shards, make it with "
            f"thinwire.{type(optimizer).__name__}(model.parameters(), mesh=mesh). Or keep your torch.optim optimizer, "
            "and call thinwire.compress(model)"
        )
    if sharded and not is_fully_sharded(model):
        raise TypeError(
            f"attach: {sharded[0]!r} is sharded by fully_shard (FSDP2), but not the model that contains it. Call "
            "fully_shard on the root module too, and attach that"
        )
    held = set(optimizer._flat_params)
    if not any(p in held for p in model.parameters()):
        raise ValueError(
            f"attach: the optimizer holds no parameter of the model ({type(model).__name__}). Pass the optimizer that "
            "was made with model.parameters()"
        )

"""What is inside the objects that frameworks hand out: Accelerate, Transformers, Lightning, Fabric and torch.compile.

Wrappers are recognized by what they hold. No framework is imported.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire._torch_compat import uncompiled, uses_fsdp1

_INNER_OPTIMIZER = ("_optimizer", "optimizer")
"""Where wrappers keep the optimizer: LightningOptimizer and _FabricOptimizer, AcceleratedOptimizer."""
_INNER_MODULE = "_forward_module"
"""Where _FabricModule keeps the module that its forward calls."""


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The optimizer that a framework has wrapped, or the object itself.

    A wrapper holds an optimizer and has no parameter groups of its own. An optimizer that is built on another one, such
    as Lookahead, has its own groups and its own state. It is returned as it is.
    """
    while True:
        held = getattr(optimizer, "__dict__", {})
        inner = [held[name] for name in _INNER_OPTIMIZER if hasattr(held.get(name), "param_groups")]
        # Classes tell nothing: wrappers of Lightning pretend to be of the class that they wrap.
        if not inner or "param_groups" in held:
            return optimizer
        optimizer = inner[0]


def distributed_model(model: Any) -> Any:
    """The DistributedDataParallel that a framework or `torch.compile` has wrapped.

    Without one, the module inside of these wrappers.
    """
    while isinstance(model, nn.Module) and not isinstance(model, DistributedDataParallel):
        inner = dict(model.named_children()).get(_INNER_MODULE, uncompiled(model))
        if inner is model:
            break
        model = inner
    return model


def unwrapped_model(model: Any) -> Any:
    """The user's module: inside all wrappers of frameworks, `torch.compile` and DistributedDataParallel."""
    while True:
        model = distributed_model(model)
        if not isinstance(model, DistributedDataParallel):
            return model
        model = model.module


def refuse_fsdp1(model: nn.Module, caller: str) -> None:
    """Reject FullyShardedDataParallel.

    Raises:
        TypeError: naming the function that was called, and what works.
    """
    if uses_fsdp1(model):
        raise TypeError(
            f"{caller}: the model is or contains torch.distributed.fsdp.FullyShardedDataParallel (FSDP1), which "
            "thinwire does not support. Use DistributedDataParallel, or torch.distributed.fsdp.fully_shard (FSDP2) on "
            "a mesh of replicas and shards"
        )

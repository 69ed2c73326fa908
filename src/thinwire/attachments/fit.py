"""Checks that an optimizer fits the model that it is attached to."""

from __future__ import annotations

from torch import nn

from thinwire.optimizers.optimizer import WireOptimizer


def check_holds_all(module: nn.Module, optimizer: WireOptimizer, averager: str) -> None:
    """Reject an optimizer that does not hold all trainable parameters of a module.

    Args:
        module: the module.
        optimizer: the optimizer.
        averager: what averages gradients before the module is attached: "DDP" or "FSDP".

    Raises:
        ValueError: naming the parameter.
    """
    held = set(optimizer._flat_params)
    for name, p in module.named_parameters():
        if p.requires_grad and p not in held:
            raise ValueError(
                f"attach: the optimizer does not hold parameter {name!r} (or it was frozen when the optimizer was "
                f"created), and {averager} would no longer average its gradient. Pass it to the optimizer, or freeze "
                "it with requires_grad_(False)"
            )

"""What frameworks do not save of each rank, or restore too early: random numbers and accumulated gradients.

A checkpoint in the middle of an accumulation is not exact without the gradients. With dropout it is not exact without
the random numbers, of which data loaders draw some when they start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from thinwire.checkpoint._random_states import random_states, restore_random_states


def state_of_rank(module: nn.Module, *, accumulating: bool) -> dict[str, Any]:
    """The states of the random number generators; and while gradients accumulate, copies of them on the host."""
    gradients = [_on_host(p.grad) for p in module.parameters()] if accumulating else None
    return {"random": random_states(module), "gradients": gradients}


def _on_host(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().to("cpu", copy=True)


def restore(module: nn.Module, state: dict[str, Any]) -> None:
    """Continue with what `state_of_rank` returned.

    Raises:
        ValueError: if the gradients are of another module.
    """
    params, gradients = list(module.parameters()), state["gradients"]
    if gradients is not None:
        if len(params) != len(gradients) or any(
            gradient is not None and gradient.shape != p.shape for p, gradient in zip(params, gradients, strict=True)
        ):
            raise ValueError("the checkpoint has gradients of other parameters than those of the model")
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = None if gradient is None else torch.empty_like(p.detach()).copy_(gradient)
    restore_random_states(module, state["random"])


def at_next_forward(model: nn.Module, call: Callable[[], None]) -> None:
    """Call a function once, before the next forward of a model that computes gradients."""
    handles: list[RemovableHandle] = []

    def before_forward(*_: object) -> None:
        if torch.is_grad_enabled():
            handles.pop().remove()
            call()

    hook: Any = torch.compiler.disable(before_forward)
    handles.append(model.register_forward_pre_hook(hook))

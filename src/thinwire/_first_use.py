"""Notice when a DistributedDataParallel that wraps a module is first used.

Frameworks wrap a module when they like: Accelerate and Transformers after the optimizer was made, Lightning before.
torch calls a hook when a DDP model takes a module in, which finds those that are made later. Those that exist already
are found among the objects of the garbage collector. Each gets a hook of its own, and the first one to be called wins.
The hook is on DDP, not on the module, so it works for modules that are compiled, and it runs before DDP prepares
backward.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire._ddp import ModelHook


class FirstUse:
    """Calls a function in the first forward, with gradients, of a DDP model that wraps a module.

    Without gradients ranks may run forward alone, for example to evaluate on one rank. With gradients all ranks run it.

    If the function raises, it is called again in the next forward.

    Args:
        module: wrapped by a model, or a part of what is wrapped.
        call: called with the model, before its forward. It must not refer to the module.
    """

    def __init__(self, module: nn.Module, call: Callable[[DistributedDataParallel], None]) -> None:
        cancel(module)
        self._call = call
        self._hooks: list[RemovableHandle] = []
        _awaited[module] = self
        _watch_registrations()
        for model in _existing(DistributedDataParallel):
            if any(part is module for part in model.modules()):
                self.watch(model)

    def watch(self, model: DistributedDataParallel) -> None:
        """Wait for the first forward of a model."""
        # The call exchanges settings with other ranks, which torch.compile must not trace.
        call: Any = torch.compiler.disable(self._before_forward)
        self._hooks.append(model.register_forward_pre_hook(ModelHook(call)))

    def _before_forward(self, model: DistributedDataParallel, _: object) -> None:
        if torch.is_grad_enabled():
            self._call(model)
            self.forget()

    def forget(self) -> None:
        """Stop waiting."""
        for hook in self._hooks:
            hook.remove()
        for module in [module for module, awaited in _awaited.items() if awaited is self]:
            del _awaited[module]
        _watch_registrations()


def cancel(module: nn.Module) -> bool:
    """Stop waiting for the use of a module or of its parts. Returns whether any of them was waited for."""
    awaited = [_awaited[part] for part in module.modules() if part in _awaited]
    for each in awaited:
        each.forget()
    return bool(awaited)


_awaited: weakref.WeakKeyDictionary[nn.Module, FirstUse] = weakref.WeakKeyDictionary()
_registrations: list[RemovableHandle] = []
"""The hook of torch that is called for every module that another one takes in, while any use is awaited."""


def _watch_registrations() -> None:
    if _awaited and not _registrations:
        _registrations.append(register_module_module_registration_hook(_on_registration))
    while _registrations and not _awaited:
        _registrations.pop().remove()


def _on_registration(model: nn.Module, name: str, taken: nn.Module | None) -> None:
    if isinstance(model, DistributedDataParallel) and name == "module" and taken is not None:
        parts = set(taken.modules())
        for module, awaited in list(_awaited.items()):
            if module in parts:
                awaited.watch(model)


def _existing(kind: type[DistributedDataParallel]) -> list[DistributedDataParallel]:
    """All objects of a class. Not by `isinstance`, which is slow for a million objects and may call their methods."""
    return [found for found in gc.get_objects() if kind in type(found).__mro__]

"""A copy of everything that `load` changes, to restore it if loading fails.

`load` checks everything that it can before it changes anything. A module may still have hooks and methods of its own
that raise after half of a model is loaded, on one rank and not on others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from thinwire._torch_compat import own_tensors
from thinwire.checkpoint._local_run import LocalRun, LocalSnapshot
from thinwire.checkpoint._optimizers import Optimizers
from thinwire.checkpoint._random_states import random_states, restore_random_states
from thinwire.optimizers.optimizer import WireOptimizer


class Snapshot:
    """A copy, in host memory, of a model, its optimizers and the random states.

    Args:
        module: the model without wrappers.
        optimizers: the optimizer, and the compression of its gradients, if any.
    """

    def __init__(self, module: nn.Module, optimizers: Optimizers) -> None:
        self._module = module
        self._optimizers: list[LocalSnapshot | _WireSnapshot | _PlainSnapshot] = []
        if isinstance(optimizers, LocalRun):
            self._optimizers.append(LocalSnapshot(optimizers.local))
        else:
            self._optimizers.append(_WireSnapshot(optimizers.wire))
        if optimizers.plain is not None:
            self._optimizers.append(_PlainSnapshot(optimizers.plain))
        # Each dictionary of parameters or buffers, and its entries.
        self._entries = [(own, dict(own)) for part in module.modules() for own in own_tensors(part)]
        held = [tensor for _, entries in self._entries for tensor in entries.values()]
        self._values = _Values(tensor for tensor in held if tensor is not None and not is_lazy(tensor))
        self._extra_states = [
            (part, copy.deepcopy(part.get_extra_state()))
            for part in module.modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
        ]
        self._random_states = random_states(module)

    @torch.no_grad()
    def restore(self, *, optimizers: bool) -> None:
        """Undo all changes since the snapshot.

        Args:
            optimizers: whether the optimizers may have changed too.
        """
        for own, entries in self._entries:
            own.clear()
            own.update(entries)
        self._values.restore()
        if optimizers:
            for each in self._optimizers:
                each.restore()
        for part, state in self._extra_states:
            part.set_extra_state(state)
        restore_random_states(self._module, self._random_states)


class _Values:
    """The contents of tensors, each of which is copied once."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # Each tensor, the memory that it had, and a copy of its contents.
        self._values = [
            (tensor, tensor.detach(), tensor.detach().to("cpu", copy=True))
            for tensor in {id(tensor): tensor for tensor in tensors}.values()
        ]

    def restore(self) -> None:
        for tensor, memory, value in self._values:
            strided = memory.layout == torch.strided
            if strided and (tensor.data_ptr() != memory.data_ptr() or tensor.stride() != memory.stride()):
                tensor.data = memory
            # Some buffers are read-only, such as expanded tensors. Those have not changed.
            if not strided or not torch.equal(memory.cpu(), value):
                memory.copy_(value)


class _Groups:
    """The parameter groups and the defaults of an optimizer. The same objects are restored: users may refer to them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = optimizer.param_groups
        self._values = [(group, dict(group)) for group in optimizer.param_groups]
        self._defaults = dict(optimizer.defaults)

    def restore(self) -> None:
        for group, values in self._values:
            group.clear()
            group.update(values)
        self._groups[:] = [group for group, _ in self._values]
        self._optimizer.param_groups = self._groups
        self._optimizer.defaults.clear()
        self._optimizer.defaults.update(self._defaults)


class _PlainSnapshot:
    """The state of any optimizer. Most replace it when they load, but one may also write into its tensors."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._groups = optimizer, _Groups(optimizer)
        self._state = optimizer.state
        tensors = list(_tensors_in(list(self._state.values())))
        self._values = _Values(tensors)
        # Copies of dictionaries and lists that hold the same tensors.
        self._entries = copy.deepcopy(dict(self._state), {id(held): held for held in (*tensors, *self._state)})

    def restore(self) -> None:
        self._groups.restore()
        self._state.clear()
        self._state.update(self._entries)
        self._optimizer.state = self._state
        self._values.restore()


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each)


class _WireSnapshot:
    def __init__(self, optimizer: WireOptimizer) -> None:
        optimizer._read_outcomes()  # complete deferred outcomes: the state must include all steps
        self._optimizer, self._groups = optimizer, _Groups(optimizer)
        # State tensors are views of a few large ones. Copy each of those once.
        kept = [tensor.untyped_storage() for of_one in optimizer._state_of for tensor in of_one.values()]
        self._storages = [
            (storage, storage.clone() if storage.device.type == "cpu" else storage.cpu())
            for storage in {storage.data_ptr(): storage for storage in kept}.values()
        ]
        self._state = optimizer.state
        self._state_entries = dict(optimizer.state)
        self._skips = copy.copy(optimizer._skips)

    def restore(self) -> None:
        optimizer = self._optimizer
        for storage, saved in self._storages:
            storage.copy_(saved)
        self._groups.restore()
        self._state.clear()
        self._state.update(self._state_entries)
        optimizer.state = self._state
        optimizer._skips, optimizer._loading = self._skips, []
        optimizer._begin_step()
        # Ranks on which the optimizer was loaded have closed their connections. All ranks must connect again.
        optimizer._disconnect()

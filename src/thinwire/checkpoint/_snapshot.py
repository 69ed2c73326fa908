"""A copy of everything that `load` changes, to restore it if loading fails.

`load` checks everything that it can before it changes anything. A module may still have hooks and methods of its own
that raise after half of a model is loaded, on one rank and not on others.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from thinwire._torch_compat import own_tensors
from thinwire.checkpoint._random_states import random_states, restore_random_states
from thinwire.optimizers.optimizer import WireOptimizer


class Snapshot:
    """A copy, in host memory, of a model, its optimizer and the random states.

    Args:
        module: the model without wrappers.
        optimizer: a thinwire optimizer.
    """

    def __init__(self, module: nn.Module, optimizer: WireOptimizer) -> None:
        self._module, self._optimizer = module, _OptimizerSnapshot(optimizer)
        # Each dictionary of parameters or buffers, and its entries.
        self._entries = [(own, dict(own)) for part in module.modules() for own in own_tensors(part)]
        tensors = {
            id(tensor): tensor
            for _, entries in self._entries
            for tensor in entries.values()
            if tensor is not None and not is_lazy(tensor)
        }
        # Each tensor, the memory that it had, and a copy of its contents.
        self._values = [(tensor, tensor.detach(), _host_copy(tensor)) for tensor in tensors.values()]
        self._extra_states = [
            (part, copy.deepcopy(part.get_extra_state()))
            for part in module.modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
        ]
        self._random_states = random_states(module)

    @torch.no_grad()
    def restore(self, *, optimizer: bool) -> None:
        """Undo all changes since the snapshot.

        Args:
            optimizer: whether the optimizer may have changed too.
        """
        for own, entries in self._entries:
            own.clear()
            own.update(entries)
        for tensor, memory, value in self._values:
            strided = memory.layout == torch.strided
            if strided and (tensor.data_ptr() != memory.data_ptr() or tensor.stride() != memory.stride()):
                tensor.data = memory
            # Some buffers are read-only, such as expanded tensors. Those have not changed.
            if not strided or not torch.equal(memory.cpu(), value):
                memory.copy_(value)
        if optimizer:
            self._optimizer.restore()
        for part, state in self._extra_states:
            part.set_extra_state(state)
        restore_random_states(self._module, self._random_states)


class _OptimizerSnapshot:
    def __init__(self, optimizer: WireOptimizer) -> None:
        optimizer._read_outcomes()  # complete deferred outcomes: the state must include all steps
        self._optimizer = optimizer
        # State tensors are views of a few large ones. Copy each of those once.
        kept = [tensor.untyped_storage() for of_one in optimizer._state_of for tensor in of_one.values()]
        self._storages = [
            (storage, storage.clone() if storage.device.type == "cpu" else storage.cpu())
            for storage in {storage.data_ptr(): storage for storage in kept}.values()
        ]
        self._groups = optimizer.param_groups
        self._group_values = [(group, dict(group)) for group in optimizer.param_groups]
        self._defaults = dict(optimizer.defaults)
        self._state = optimizer.state
        self._state_entries = dict(optimizer.state)
        self._skips = copy.copy(optimizer._skips)

    def restore(self) -> None:
        optimizer = self._optimizer
        for storage, saved in self._storages:
            storage.copy_(saved)
        # Restore the same objects: users may hold references to them.
        for group, values in self._group_values:
            group.clear()
            group.update(values)
        self._groups[:] = [group for group, _ in self._group_values]
        self._state.clear()
        self._state.update(self._state_entries)
        optimizer.param_groups, optimizer.state = self._groups, self._state
        optimizer.defaults.clear()
        optimizer.defaults.update(self._defaults)
        optimizer._skips, optimizer._loading = self._skips, []
        optimizer._begin_step()
        # Ranks on which the optimizer was loaded have closed their connections. All ranks must connect again.
        optimizer._disconnect()


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)

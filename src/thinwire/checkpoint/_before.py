"""What there was before a checkpoint was loaded, to go back to when loading fails midway.

Everything that can be checked is checked before. But modules may have hooks and methods of their own, which may raise
when half of a model is loaded, on one rank and not on others.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from thinwire.checkpoint import _contents
from thinwire.optimizers.optimizer import WireOptimizer


class Before:
    """A copy, in host memory, of everything that `load` changes.

    Args:
        module: the model itself.
        optimizer: of thinwire.
    """

    def __init__(self, module: nn.Module, optimizer: WireOptimizer) -> None:
        self._module, self._optimizer = module, _OptimizerBefore(optimizer)
        self._parts = [(part, dict(part._parameters), dict(part._buffers)) for part in module.modules()]
        tensors = {
            id(tensor): tensor
            for _, parameters, buffers in self._parts
            for tensor in (*parameters.values(), *buffers.values())
            if tensor is not None and not is_lazy(tensor)
        }
        self._values = [(tensor, tensor.detach(), _copied(tensor)) for tensor in tensors.values()]
        """Tensors, the memory that they had, and what was in it."""
        self._extra = [
            (part, copy.deepcopy(part.get_extra_state()))
            for part in module.modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
        ]
        self._random = _contents.random_states(module)

    @torch.no_grad()
    def restore(self, *, optimizer: bool) -> None:
        """Go back.

        Args:
            optimizer: whether loading has come as far as the optimizer.
        """
        for part, parameters, buffers in self._parts:
            part._parameters.clear()
            part._parameters.update(parameters)
            part._buffers.clear()
            part._buffers.update(buffers)
        for tensor, memory, value in self._values:
            strided = memory.layout == torch.strided
            if strided and (tensor.data_ptr() != memory.data_ptr() or tensor.stride() != memory.stride()):
                tensor.data = memory
            if not strided or not torch.equal(memory.cpu(), value):  # some buffers cannot be written to, and were not
                memory.copy_(value)
        if optimizer:
            self._optimizer.restore()
        for part, state in self._extra:
            part.set_extra_state(state)
        _contents.restore_random_states(self._module, self._random)


class _OptimizerBefore:
    def __init__(self, optimizer: WireOptimizer) -> None:
        optimizer._read_outcomes()  # the state is that of all steps that were taken
        self._optimizer = optimizer
        # Parameters have views of a few large tensors, which are copied once.
        kept = [tensor.untyped_storage() for of_one in optimizer._state_of for tensor in of_one.values()]
        self._storages = [
            (storage, storage.clone() if storage.device.type == "cpu" else storage.cpu())
            for storage in {storage.data_ptr(): storage for storage in kept}.values()
        ]
        self._groups = optimizer.param_groups
        self._values = [(group, dict(group)) for group in optimizer.param_groups]
        self._defaults = dict(optimizer.defaults)
        self._shown = optimizer.state
        self._states = dict(optimizer.state)
        self._skips = copy.copy(optimizer._skips)

    def restore(self) -> None:
        optimizer = self._optimizer
        for storage, saved in self._storages:
            storage.copy_(saved)
        # The same objects: a user may have references to them.
        for group, values in self._values:
            group.clear()
            group.update(values)
        self._groups[:] = [group for group, _ in self._values]
        self._shown.clear()
        self._shown.update(self._states)
        optimizer.param_groups, optimizer.state = self._groups, self._shown
        optimizer.defaults.clear()
        optimizer.defaults.update(self._defaults)
        optimizer._skips, optimizer._loading = self._skips, []
        optimizer._begin_step()
        # Ranks whose optimizers had loaded already have ended their connections: all of them agree again.
        optimizer._disconnect()


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)

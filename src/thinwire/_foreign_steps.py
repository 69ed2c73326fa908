"""Refuse the step of an optimizer whose parameters are attached to another one.

After `thinwire.attach` nothing averages gradients. An optimizer that steps with them moves each replica in its
own direction, and nobody would notice. torch calls a hook before the step of every optimizer.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from thinwire._unwrap import unwrapped_optimizer


class Reservation:
    """Reserves parameters for the steps of one optimizer, until it is released or forgotten.

    Args:
        optimizer: the only optimizer that may move them.
        params: the parameters, which the optimizer holds.
    """

    def __init__(self, optimizer: Optimizer, params: Iterable[Tensor]) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.params = {id(p) for p in params}
        _reservations.add(self)
        _accepted.clear()
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))

    def release(self) -> None:
        """Let any optimizer move the parameters."""
        _reservations.discard(self)
        while _hooks and not _reservations:
            _hooks.pop().remove()


_reservations: weakref.WeakSet[Reservation] = weakref.WeakSet()
_accepted: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Optimizers that were checked, and how many parameters they had."""
_hooks: list[RemovableHandle] = []
"""The hook of torch."""


def _before_step(optimizer: Optimizer, *_: object) -> None:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _accepted.get(optimizer) == count:
        return
    if _reserved_by_another(optimizer) is not None:
        gc.collect()  # an attached model that is no longer used may be part of a reference cycle
        attached = _reserved_by_another(optimizer)
        if attached is not None:
            name, its = type(optimizer).__name__, type(attached).__name__
            raise RuntimeError(
                f"step() of {name}, but its parameters are attached to another optimizer ({its}): their gradients are "
                f"not averaged, so {name} would move every replica in a different direction. Call step() of the "
                f"attached {its}; or call thinwire.detach(model) first, after which gradients are averaged again"
            )
    _accepted[optimizer] = count


def _reserved_by_another(optimizer: Optimizer) -> Optimizer | None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    # An optimizer that is built on the attached one, such as Lookahead, calls its step().
    allowed = {id(optimizer), id(unwrapped_optimizer(optimizer)), id(getattr(optimizer, "optimizer", None))}
    for reservation in _reservations:
        attached = reservation.optimizer()
        if attached is not None and id(attached) not in allowed and not held.isdisjoint(reservation.params):
            return attached
    return None

"""Compressed averaging between the replicas of a model that `fully_shard` has sharded on a two-dimensional mesh.

FSDP no longer averages gradients over the replicas; see `thinwire._fsdp`. A hook on each parameter encodes its
shard of the gradient as soon as FSDP has stored it in `.grad`, and the session exchanges buckets while backward
continues. At the end of backward the means are written into the memory of `.grad`.

One exchange serves all FSDP groups of a model. Buckets follow the order in which backward completes groups.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from thinwire._fsdp import (
    check_all_reduce_hooks,
    check_materialized,
    replicate_group,
    resume_all_reduce,
    stop_all_reduce,
)
from thinwire._torch_compat import FsdpGroup, at_end_of_backward, post_accumulate_hooks
from thinwire.averaging.averager import GradientAverager, loss_scale
from thinwire.optimizers.inputs import mark_averaged, unmark_averaged
from thinwire.optimizers.sharding import local
from thinwire.transport.failures import on_mesh
from thinwire.transport.peers import Peers


def average_replicas(
    model: nn.Module,
    make: Callable[[dict[Tensor, str], ProcessGroup | None], GradientAverager],
    grad_scaler: torch.amp.GradScaler | None,
) -> GradientAverager:
    """Let an averager replace the all-reduce of a model over its replicas. All ranks call this.

    Args:
        model: a module to which `fully_shard` was applied.
        make: makes the averager of tensors with names, for a process group. It may raise on any rank.
        grad_scaler: the GradScaler in use, if any.

    Raises:
        ValueError: if the mesh has no replicate dimension, or groups have different replicas.
        TypeError, ValueError, RuntimeError: on every rank, as `make` or the agreement of ranks; or if the model has
            hooks that would see gradients before they are averaged.
    """
    groups = FsdpGroup.all_of(model)
    process_group = replicate_group(groups, "compress")
    replicas, shards = Peers.of(process_group), _peers(groups[0].shard_group)
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    trainable = [p for group in groups for p in group.parameters if p.requires_grad]

    own = [nn.Parameter(_local(p)) for p in trainable]
    names_of_own: dict[Tensor, str] = {tensor: names[p] for tensor, p in zip(own, trainable, strict=True)}

    def build() -> GradientAverager:
        check_all_reduce_hooks(groups, "compress")
        _check_hooks(groups, names)
        check_materialized(trainable, names, "compress")
        return make(names_of_own, process_group)

    averager = on_mesh(replicas, shards, build)
    on_mesh(replicas, shards, lambda: averager._prepare(names_of_own))
    mark_averaged(trainable, averager)
    _averagings[model] = weakref.ref(_FsdpAveraging(groups, averager, trainable, own, names, grad_scaler))
    return averager


def detach_replicas(model: nn.Module) -> bool:
    """Let FSDP average the gradients of a model again. All ranks call this.

    Returns:
        Whether an averager did so before.
    """
    reference = _averagings.pop(model, None)
    averaging = reference() if reference is not None else None
    if averaging is not None:
        averaging.detach()
    return averaging is not None


def _check_hooks(groups: Sequence[FsdpGroup], names: dict[Tensor, str]) -> None:
    for group in groups:
        for p in group.parameters:
            if post_accumulate_hooks(p):
                raise RuntimeError(
                    f"compress: parameter {names[p]!r} has a hook (register_post_accumulate_grad_hook), which would "
                    "get its gradient before it is averaged. Use gradients after backward"
                )


def _peers(group: ProcessGroup | None) -> Peers:
    return Peers(None, 0, 1) if group is None else Peers.of(group)


@torch.no_grad()
def _local(sharded: Tensor) -> Tensor:
    """The memory of this rank's shard of a parameter or a gradient, as an ordinary tensor, which an averager needs.

    One element stands for an empty shard, because packets have no presence bit for a tensor without elements. If only
    other replicas have used the parameter, all shards must get a gradient: collectives on gradients need all of them.
    """
    shard = local(sharded)
    return shard if shard.numel() else shard.new_zeros(1)


class _FsdpAveraging:
    """Exchanges the gradients of one backward after another.

    The process group that replaces the replicate group, and so the model, holds the only strong reference. Hooks of
    parameters hold weak references, because the garbage collector cannot traverse them.

    Args:
        groups: all groups of the model.
        averager: holds `own`.
        params: the trainable parameters of the groups, in their order.
        own: the averager's tensor for each of them.
        names: of all parameters.
        grad_scaler: the GradScaler in use, if any.
    """

    def __init__(
        self,
        groups: Sequence[FsdpGroup],
        averager: GradientAverager,
        params: Sequence[nn.Parameter],
        own: Sequence[nn.Parameter],
        names: dict[Tensor, str],
        grad_scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._groups = groups
        self._averager = averager
        self._params = params
        self._own = own
        self._names = names
        self._frozen = [p for group in groups for p in group.parameters if not p.requires_grad]
        self._grad_scaler = grad_scaler
        self._reducing = False
        """Whether FSDP has reduced gradients in the backward under way."""
        self._under_way = False
        """Whether the exchange of this backward has begun."""
        self._added = [False] * len(params)
        """Whether the gradient of each parameter was added to the exchange under way."""
        averager.loss_scale_now = functools.partial(loss_scale, grad_scaler)
        params_of: dict[Tensor, nn.Parameter] = dict(zip(own, params, strict=True))

        def new_gradient(tensor: Tensor) -> Tensor:
            p = params_of[tensor]
            p.grad = torch.zeros_like(p)
            return _local(p.grad).view(-1)

        averager.gradient_of = new_gradient
        stop_all_reduce(groups, "compress", self._before_all_reduce)
        self._hooks = [_register_hook(p, weakref.ref(self), index) for index, p in enumerate(params)]

    def detach(self) -> None:
        """Restore the groups, and remove the hooks."""
        resume_all_reduce(self._groups)
        for hook in self._hooks:
            hook.remove()
        unmark_averaged(self._params)
        self._averager.release()

    def _before_all_reduce(self) -> None:
        # No other errors may occur here: torch would replace them by its own, about a group that it does not know.
        if not self._reducing:
            self._reducing = True
            # FSDP has queued its own callback in this backward before. That one reduces the gradients of modules whose
            # inputs need none, such as embeddings.
            at_end_of_backward(self._finish)

    def _begin(self) -> None:
        """Begin the exchange of a backward, with its first gradient."""
        try:
            self._follow_parameters()
            self._averager.begin(loss_scale(self._grad_scaler))
        except BaseException:
            self._reducing = False  # this backward ends here, without its callback
            raise
        self._under_way = True

    def _follow_parameters(self) -> None:
        """Let the averager's tensors have the present memory of the parameters."""
        present = [p for group in self._groups for p in group.parameters]
        for p in self._frozen:
            if p.requires_grad:
                raise RuntimeError(
                    f"parameter {self._names[p]!r} requires gradients, but was frozen when thinwire.compress was "
                    "called, so its gradient is not averaged. Freeze parameters after compress"
                )
        if {id(p) for p in present} != {id(p) for p in (*self._params, *self._frozen)}:
            raise RuntimeError(
                "parameters of the model were replaced after thinwire.compress, for example by "
                "load_state_dict(assign=True), so their gradients are not averaged. Replace them before compress"
            )
        for p, own in zip(self._params, self._own, strict=True):
            own.data = _local(p)

    def on_accumulated(self, index: int, p: Tensor) -> None:
        """Encode the gradient of a parameter. FSDP calls this when it has stored the gradient in `.grad`."""
        if not self._reducing:
            return  # autograd, for a loss that uses the shard itself: FSDP does not average such a gradient either
        if not self._under_way:
            self._begin()
        if self._added[index]:
            with self._averager.abort_on_error():
                raise RuntimeError(
                    f"parameter {self._names[p]!r} got a gradient twice in one exchange. Either the backward before "
                    "this one failed, or the loss uses the parameter outside of its module: then average such terms "
                    "in a backward of their own"
                )
        self._add(index, p.grad, present=True)

    def _add(self, index: int, grad: Tensor | None, *, present: bool) -> None:
        assert grad is not None, "FSDP has stored a gradient"
        self._added[index] = True
        self._averager.add(self._own[index], _local(grad).view(-1), present=present)

    @torch.no_grad()
    def _finish(self) -> None:
        """Wait for the means, at the end of backward."""
        if not self._under_way:  # no parameter that the averager holds has a gradient
            self._begin()
        absent: dict[Tensor, tuple[nn.Parameter, Tensor]] = {}
        for index, p in enumerate(self._params):
            if not self._added[index]:
                grad = p.grad
                if grad is None:  # this replica did not use the parameter; others may have
                    grad = torch.zeros_like(p)
                    absent[self._own[index]] = p, grad
                self._add(index, grad, present=p.grad is not None)
        self._reducing = self._under_way = False
        self._added = [False] * len(self._params)
        for own in self._averager.finish():
            if own in absent:
                p, p.grad = absent[own]


_averagings: weakref.WeakKeyDictionary[nn.Module, weakref.ref[_FsdpAveraging]] = weakref.WeakKeyDictionary()
"""The averaging of each model. The groups of a model hold the only strong reference."""


def _register_hook(p: nn.Parameter, averaging: weakref.ref[_FsdpAveraging], index: int) -> RemovableHandle:
    def on_accumulated(p: Tensor) -> None:
        alive = averaging()
        if alive is not None:
            alive.on_accumulated(index, p)

    hook: Any = on_accumulated
    return p.register_post_accumulate_grad_hook(hook)

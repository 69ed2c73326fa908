"""An optimizer exchanges the gradients of a DistributedDataParallel model.

DDP still does everything except for the gradients. For DDP every backward runs under `no_sync()`, so it neither copies
gradients into its buckets and back nor fills in gradients of unused parameters. `.grad` stays the local gradient.
"""

from __future__ import annotations

import weakref
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from thinwire import _torch_compat
from thinwire._ddp import ModelHook, check_hooks, end_unsynchronized_forward, give_back, take_over
from thinwire._first_use import FirstUse
from thinwire.attachments.early_encoding import EarlyEncoding
from thinwire.attachments.fit import check_holds_all
from thinwire.optimizers.optimizer import WireOptimizer


def attach_when_used(
    module: nn.Module, optimizer: WireOptimizer, grad_scaler: torch.amp.GradScaler | None, *, overlap: bool
) -> None:
    """Attach the first DDP model that wraps a module and is used."""
    reference = weakref.ref(optimizer)

    def at_first_use(model: DistributedDataParallel) -> None:
        alive = reference()
        if alive is not None:
            # torch has already collected the hooks that it calls before this forward.
            attach_ddp(model, alive, grad_scaler, overlap=overlap).before_forward()

    FirstUse(module, at_first_use)


def attach_ddp(
    model: DistributedDataParallel,
    optimizer: WireOptimizer,
    grad_scaler: torch.amp.GradScaler | None,
    *,
    overlap: bool,
) -> DdpAttachment:
    """Attach a model. All ranks call this. For the arguments and errors see `thinwire.attach`."""
    _check_fit(model, optimizer)
    names = {p: name for name, p in model.module.named_parameters()}
    optimizer._prepare(names)
    # _prepare() has compared the ranks. They are equal, so an error below occurs on all of them.
    previous = ddp_attachment_of(model.module)
    if previous is not None:
        # The module was attached before, inside another DistributedDataParallel, to another optimizer.
        previous.detach()
    attachment = DdpAttachment(model, optimizer, names, grad_scaler, overlap=overlap)
    _attachments[model.module] = weakref.ref(attachment)
    return attachment


def _check_fit(model: DistributedDataParallel, optimizer: WireOptimizer) -> None:
    check_hooks(model, "attach")
    ranks = torch.distributed.get_process_group_ranks(model.process_group)
    if ranks != optimizer._peers.ranks():
        raise ValueError(
            f"attach: the model's process group has ranks {ranks}, the optimizer's {optimizer._peers.ranks()}: "
            "pass process_group=model.process_group to the optimizer"
        )
    check_holds_all(model.module, optimizer, "DDP")


class DdpAttachment:
    """The hooks of a DDP model. These and the hooks of the optimizer hold the only strong references.

    Args:
        model: the model.
        optimizer: holds its parameters.
        names: of the parameters.
        grad_scaler: the GradScaler in use, if any.
        overlap: whether to exchange during backward.
    """

    caller = "attach"

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: WireOptimizer,
        names: dict[Tensor, str],
        grad_scaler: torch.amp.GradScaler | None,
        *,
        overlap: bool,
    ) -> None:
        self._model = model
        self._overlap = overlap
        self._user_synchronizes = True
        """False inside the user's `no_sync()`."""
        take_over(model, self)
        _torch_compat.disable_static_graph_all_reduce(model)
        how = "under no_sync()"
        self._encoding = EarlyEncoding(optimizer, names, grad_scaler, self, overlap=overlap, accumulate=how)
        self._encoding.active = False  # until a forward
        self._hooks = [
            model.register_forward_pre_hook(ModelHook(self.before_forward)),
            model.register_forward_hook(ModelHook(self._after_forward), always_call=True),
        ]

    def detach(self) -> None:
        """Remove all hooks, and let DDP average gradients again. See `thinwire._ddp.Exchanger`."""
        for hook in self._hooks:
            hook.remove()
        self._encoding.end()
        give_back(self._model)
        if self._model.static_graph:
            self._model.register_forward_pre_hook(ModelHook(_refuse_static_graph))
        del _attachments[self._model.module]

    def discard_exchange(self) -> None:
        """Discard gradients that were sent and not applied. All ranks call this."""
        self._encoding.discard_exchange()

    def exchange(self, bucket: GradBucket) -> NoReturn:
        """DDP never calls its hook. It is registered so that DDP rejects other hooks, which it would not call."""
        raise RuntimeError(
            f"DDP was about to exchange its bucket {bucket.index()}, but the model is attached to thinwire. Was "
            "require_backward_grad_sync changed between forward and backward?"
        )

    def before_forward(self, *_: object) -> None:
        """Decide whether the next backward exchanges gradients. Called by the model."""
        # DDP decides in forward whether the next backward synchronizes; no_sync() must surround both. So do we.
        if torch.is_grad_enabled():
            self._user_synchronizes = _torch_compat.synchronizes_gradients(self._model)
            self._encoding.active = self._overlap and self._user_synchronizes
            _torch_compat.set_gradient_synchronization(self._model, enabled=False)

    def _after_forward(self, *_: object) -> None:
        if torch.is_grad_enabled():
            end_unsynchronized_forward(self._model, synchronizes=self._user_synchronizes)


_attachments: weakref.WeakKeyDictionary[nn.Module, weakref.ref[DdpAttachment]] = weakref.WeakKeyDictionary()


def ddp_attachment_of(module: nn.Module) -> DdpAttachment | None:
    """The attachment of the DDP model that wraps a module, if there is one."""
    reference = _attachments.get(module)
    return reference() if reference is not None else None


def _refuse_static_graph(*_: object) -> None:
    # DDP has counted accumulations while it did not synchronize. It would not synchronize the second backward.
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a DistributedDataParallel model with static_graph=True that was attached and detached cannot average "
            "gradients. Wrap its module in a new DistributedDataParallel"
        )

"""`thinwire.attach`: let an optimizer exchange the gradients of a DistributedDataParallel model.

DDP still does everything except for the gradients. For DDP every backward runs under `no_sync()`, so it neither copies
gradients into its buckets and back nor fills in gradients of unused parameters. A hook on each parameter encodes its
gradient as soon as autograd has accumulated it: on the thread that computed it, while it is still in the cache. The
lanes exchange the packets while backward continues. `.grad` stays the local gradient.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire import _torch_compat
from thinwire._ddp import ModelHook, check_hooks, give_back, take_over
from thinwire._first_use import FirstUse, cancel
from thinwire._foreign_steps import Reservation
from thinwire._unwrap import distributed_model, refuse_fsdp1, unwrapped_optimizer
from thinwire.kernels.modes import Scale
from thinwire.optimizers.optimizer import WireOptimizer


def attach(
    model: nn.Module,
    optimizer: Any,
    *,
    overlap: bool = True,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Let a thinwire optimizer do the communication of a DistributedDataParallel model. All ranks call it.

    DDP no longer averages gradients; the optimizer exchanges packets while backward runs. Results are equal, to the
    bit, to those of the same optimizer without `attach` on a module without DDP.

    A module that is not wrapped yet may be given instead, for frameworks that wrap it themselves. `attach` then takes
    effect in the first forward, with gradients, of a DistributedDataParallel model that wraps the module or contains
    it; what does not fit is refused there. If nothing ever wraps it, `step()` exchanges by itself.

    `no_sync()` accumulates gradients as before. Gradients are sent as backward produces them. A change of `.grad`
    between backward and `step()`, such as `clip_grad_norm_`, would have no effect, so `step()` raises GradientChanged:
    use `clip_norm=` or `clip_value=` of the optimizer, or `overlap=False`. `GradScaler.unscale_` is no such change.
    DDP still sends buffers in forward. If a rank is lost there, torch raises the error, not thinwire.

    No other optimizer may move the parameters: its `step()` raises RuntimeError. `thinwire.detach` ends it all.

    Args:
        model: a DistributedDataParallel model, or a module that will be wrapped in one; also inside the wrapper of a
            framework or of torch.compile. The optimizer holds all of its trainable parameters.
        optimizer: a thinwire optimizer, also inside the wrapper of a framework.
        overlap: exchange during backward; otherwise in `step()`, which then sends `.grad` as it is, clipped or not.
        grad_scaler: the torch.amp.GradScaler in use, if any. Gradients are encoded during backward, before
            `scaler.step()` could unscale them. An overflow on one rank then lowers the scale on all ranks.

    Raises:
        TypeError: if the model is not a module, or is sharded; or if the optimizer is not thinwire's.
        ValueError: if the optimizer does not fit the model.
        ValueError: on every rank, if the nodes are unknown or have different numbers of ranks.
        RuntimeError: if the model has a communication hook already; or, on every rank, if ranks differ in the
            optimizer's class, its hyper-parameters, the parameters' names, shapes or dtypes, the version or the seed.
    """
    inner, wire = distributed_model(model), unwrapped_optimizer(optimizer)
    if not isinstance(wire, WireOptimizer):
        raise TypeError(
            f"attach: optimizer is {type(wire).__module__}.{type(wire).__name__}, expected a thinwire optimizer, for "
            "example thinwire.Birder"
        )
    _check_model(inner, wire)
    if isinstance(inner, DistributedDataParallel):
        cancel(inner.module)
        _attach(inner, wire, grad_scaler, overlap=overlap)
    else:
        _attach_when_used(inner, wire, grad_scaler, overlap=overlap)


def _check_model(model: object, optimizer: WireOptimizer) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"attach: model is {type(model).__name__}, expected torch.nn.parallel.DistributedDataParallel, or the "
            "torch.nn.Module that it will wrap"
        )
    refuse_fsdp1(model, "attach")
    if _torch_compat.is_fully_sharded(model):
        raise TypeError(
            "attach: the model is sharded by fully_shard (FSDP2). Keep your torch.optim optimizer, and call "
            "thinwire.compress(model)"
        )
    held = set(optimizer._flat_params)
    if not any(p in held for p in model.parameters()):
        raise ValueError(
            f"attach: the optimizer holds no parameter of the model ({type(model).__name__}). Pass the optimizer that "
            "was made with model.parameters()"
        )


def _attach_when_used(
    module: nn.Module, optimizer: WireOptimizer, grad_scaler: torch.amp.GradScaler | None, *, overlap: bool
) -> None:
    """Attach the first DDP model that wraps a module and is used."""
    reference = weakref.ref(optimizer)

    def at_first_use(model: DistributedDataParallel) -> None:
        alive = reference()
        if alive is not None:
            # torch has already collected the hooks that it calls before this forward.
            _attach(model, alive, grad_scaler, overlap=overlap)._before_forward()

    FirstUse(module, at_first_use)


def _attach(
    model: DistributedDataParallel,
    optimizer: WireOptimizer,
    grad_scaler: torch.amp.GradScaler | None,
    *,
    overlap: bool,
) -> _Attachment:
    _check_fit(model, optimizer)
    names = {p: name for name, p in model.module.named_parameters()}
    optimizer._prepare(names)
    # _prepare() has compared the ranks. They are equal, so an error below occurs on all of them.
    previous = attachment_of(model.module)
    if previous is not None:
        # The module was attached before, inside another DistributedDataParallel, to another optimizer.
        previous.detach()
    attachment = _Attachment(model, optimizer, names, grad_scaler, overlap=overlap)
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
    held = set(optimizer._flat_params)
    for name, p in model.module.named_parameters():
        if p.requires_grad and p not in held:
            raise ValueError(
                f"attach: the optimizer does not hold parameter {name!r} (or it was frozen when the optimizer was "
                "created), and DDP would no longer average its gradient. Pass it to the optimizer, or freeze it with "
                "requires_grad_(False)"
            )


class _Attachment:
    """Encodes each gradient when autograd has accumulated it completely.

    Autograd accumulates into most parameters once per step, and more often with reentrant checkpointing or several
    backward passes. The counts of earlier steps tell which accumulation is the last one. `step()` encodes parameters
    with fewer accumulations than expected, or with none.

    The hooks of the model and of the optimizer hold the only strong references. Hooks of parameters hold weak
    references, because the garbage collector cannot traverse them.
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
        self._optimizer = optimizer
        self._names = names
        self._grad_scaler = grad_scaler
        self._overlap = overlap
        self._user_synchronizes = True
        """False inside the user's `no_sync()`."""
        self._encodes_in_backward = False
        self._expected = [0] * len(optimizer._flat_params)
        """Accumulations per step that make a gradient complete, for each parameter; 0 if unknown."""
        self._seen = [0] * len(optimizer._flat_params)
        """Accumulations since the last step."""
        self._steps_with_fewer = 0
        """Steps in a row in which some parameter had fewer accumulations than expected."""
        take_over(model, self)
        _torch_compat.disable_static_graph_all_reduce(model)
        self._reservation = Reservation(optimizer, names)
        self._hooks = [
            model.register_forward_pre_hook(ModelHook(self._before_forward)),
            model.register_forward_hook(ModelHook(self._after_forward), always_call=True),
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        optimizer._after_step.append(self._after_step)
        for position, p in enumerate(optimizer._flat_params):
            if p in names:
                self._hooks.append(_register_gradient_hook(p, weakref.ref(self), position))

    def detach(self) -> None:
        """Remove all hooks, and let DDP average gradients again. See `thinwire._ddp.Exchanger`."""
        for hook in self._hooks:
            hook.remove()
        self._optimizer._after_step.remove(self._after_step)
        self._reservation.release()
        give_back(self._model)
        if self._model.static_graph:
            self._model.register_forward_pre_hook(ModelHook(_refuse_static_graph))
        del _attachments[self._model.module]

    def discard_exchange(self) -> None:
        """Discard gradients that were sent and not applied. All ranks call this."""
        self._optimizer._finish_exchange()
        self._optimizer._begin_step()

    def exchange(self, bucket: GradBucket) -> NoReturn:
        """DDP never calls its hook. It is registered so that DDP rejects other hooks, which it would not call."""
        raise RuntimeError(
            f"DDP was about to exchange its bucket {bucket.index()}, but the model is attached to thinwire. Was "
            "require_backward_grad_sync changed between forward and backward?"
        )

    def _before_forward(self, *_: object) -> None:
        # DDP decides in forward whether the next backward synchronizes; no_sync() must surround both. So do we.
        if torch.is_grad_enabled():
            self._user_synchronizes = _torch_compat.synchronizes_gradients(self._model)
            self._encodes_in_backward = self._overlap and self._user_synchronizes
            _torch_compat.set_gradient_synchronization(self._model, enabled=False)

    def _after_forward(self, *_: object) -> None:
        if torch.is_grad_enabled():
            _torch_compat.set_gradient_synchronization(self._model, enabled=self._user_synchronizes)
            _torch_compat.set_buffer_synchronization(self._model, enabled=self._user_synchronizes)

    def on_accumulated(self, position: int, p: Tensor) -> None:
        """Count an accumulation into a gradient, and encode the gradient if it was the last one of the step."""
        if not self._encodes_in_backward:
            return
        self._seen[position] += 1
        self._optimizer._watch(position)
        seen, expected = self._seen[position], self._expected[position]
        if seen == expected:
            self._optimizer._encode_early(position, self._scale())
        elif 0 < expected < seen:
            raise RuntimeError(
                f"parameter {self._names[p]!r} got a gradient {seen} times since the last step, but {expected} times "
                "before, so it was sent already. Run all but the last backward of a step under no_sync(); call step() "
                "after every other backward, even if gradients are not finite (all ranks then skip the step); or "
                "attach with overlap=False"
            )

    def _scale(self) -> Scale:
        if self._grad_scaler is None or not self._grad_scaler.is_enabled():
            return 1.0
        scale = _torch_compat.current_scale(self._grad_scaler)
        return 1.0 / self._grad_scaler.get_scale() if scale is None else self._optimizer._inverse(scale)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._overlap and self._grad_scaler is None and _torch_compat.is_called_by_scaler(optimizer):
            raise RuntimeError(
                "step() was called by a GradScaler that was not given to attach, after scaled gradients were sent: "
                "use thinwire.attach(model, optimizer, grad_scaler=scaler)"
            )

    def _after_step(self) -> None:
        if self._grad_scaler is not None and self._grad_scaler.is_enabled():
            # All ranks skip a step in which any rank overflowed, so all must lower their scales. The scaler has
            # checked the gradients of this rank only.
            overflow = self._optimizer._overflow()
            for flag in _torch_compat.overflow_flags(self._grad_scaler, self._optimizer):
                if isinstance(overflow, Tensor):
                    torch.maximum(flag, overflow, out=flag)
                elif self._optimizer._delay.steps:
                    # What this rank alone has found is known to all in the next step. They lower their scales together.
                    flag.fill_(float(overflow))
                elif overflow:
                    flag.fill_(1.0)
        fewer = any(0 < seen < expected for seen, expected in zip(self._seen, self._expected, strict=True))
        self._steps_with_fewer = self._steps_with_fewer + 1 if fewer else 0
        if self._steps_with_fewer == _STEPS_UNTIL_FEWER:
            # The larger counts were an exception, such as a trial backward before training.
            self._expected = [seen or expected for seen, expected in zip(self._seen, self._expected, strict=True)]
        else:
            self._expected = [max(pair) for pair in zip(self._seen, self._expected, strict=True)]
        self._seen = [0] * len(self._seen)

    def _after_load(self, *_: object) -> None:
        self._seen = [0] * len(self._seen)


_STEPS_UNTIL_FEWER = 8
"""After so many steps in a row with fewer accumulations than expected, fewer are expected."""

_attachments: weakref.WeakKeyDictionary[nn.Module, weakref.ref[_Attachment]] = weakref.WeakKeyDictionary()


def attachment_of(module: nn.Module) -> _Attachment | None:
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


def _register_gradient_hook(p: Tensor, attachment: weakref.ref[_Attachment], position: int) -> RemovableHandle:
    def on_accumulated(p: Tensor) -> None:
        attached = attachment()
        if attached is not None:
            attached.on_accumulated(position, p)

    # A frozen parameter gets its hook too: it may require gradients later. torch registers hooks only on those that do.
    frozen = not p.requires_grad
    p.requires_grad_(True)
    handle = p.register_post_accumulate_grad_hook(on_accumulated)
    p.requires_grad_(not frozen)
    return handle

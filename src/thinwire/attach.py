"""`thinwire.attach`: let an optimizer exchange the gradients of a DistributedDataParallel model.

DDP still does everything except for the gradients. For DDP every backward runs under `no_sync()`, so it neither copies
gradients into its buckets and back nor fills in gradients of unused parameters. A hook on each parameter encodes its
gradient as soon as autograd has accumulated it: on the thread that computed it, while it is still in the cache. The
lanes exchange the packets while backward continues. `.grad` stays the local gradient.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of its hook, which must be types.
import weakref

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire import _torch_compat
from thinwire._ddp import check_hooks, disable_join
from thinwire.kernels.modes import Scale
from thinwire.optimizers.optimizer import WireOptimizer


def attach(
    model: nn.Module,
    optimizer: WireOptimizer,
    *,
    overlap: bool = True,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Let a thinwire optimizer do the communication of a DistributedDataParallel model.

    DDP no longer averages gradients; the optimizer exchanges packets while backward runs. Results are equal, to the
    bit, to those of the same optimizer without `attach` on a module without DDP.

    `no_sync()` accumulates gradients as before. From the second step on gradients are encoded as backward produces
    them. Changes of `.grad` between backward and `step()`, such as `clip_grad_norm_`, then have no effect on the step.
    DDP still sends buffers in forward. If a rank is lost there, torch raises the error, not thinwire.

    Args:
        model: a DistributedDataParallel model. The optimizer holds all of its trainable parameters.
        optimizer: a thinwire optimizer.
        overlap: exchange during backward; otherwise in `step()`.
        grad_scaler: the torch.amp.GradScaler in use, if any. Gradients are encoded during backward, before
            `scaler.step()` could unscale them. An overflow on one rank then lowers the scale on all ranks.

    Raises:
        TypeError: if the model is not DistributedDataParallel, or the optimizer is not thinwire's.
        ValueError: if the optimizer does not fit the model.
        ValueError: on every rank, if the nodes are unknown or have different numbers of ranks.
        RuntimeError: if the model has a communication hook already; or, on every rank, if ranks differ in the
            optimizer's class, its hyper-parameters, the parameters' names, shapes or dtypes, the version or the seed.
    """
    if not isinstance(model, DistributedDataParallel):
        compiled = isinstance(_torch_compat.uncompiled(model), DistributedDataParallel)
        raise TypeError(
            f"attach: model is {type(model).__name__}, expected torch.nn.parallel.DistributedDataParallel. "
            + ("Call attach before torch.compile" if compiled else "Without DDP, step() exchanges by itself")
        )
    if not isinstance(optimizer, WireOptimizer):
        raise TypeError(
            f"attach: optimizer is {type(optimizer).__module__}.{type(optimizer).__name__}, expected a thinwire "
            "optimizer, for example thinwire.Birder"
        )
    _check_fit(model, optimizer)
    names = {p: name for name, p in model.module.named_parameters()}
    optimizer._prepare(names)
    # _prepare() has compared the ranks. They are equal, so an error below occurs on all of them.
    model.register_comm_hook(None, _unexpected_exchange)
    disable_join(model, "attach")
    reference = _attachments.get(model.module)
    previous = reference() if reference is not None else None
    if previous is not None:
        # The module was attached before, inside another DistributedDataParallel, to another optimizer.
        previous.detach()
    _attachments[model.module] = weakref.ref(_Attachment(model, optimizer, names, grad_scaler, overlap=overlap))


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


def _unexpected_exchange(_: object, bucket: GradBucket) -> Future[Tensor]:
    # DDP never calls this hook. It is registered so that DDP rejects other hooks, which it would not call either.
    raise RuntimeError(
        f"DDP was about to exchange its bucket {bucket.index()}, but the model is attached to thinwire. Was "
        "require_backward_grad_sync changed between forward and backward?"
    )


class _Attachment:
    """Encodes each gradient when autograd has accumulated it completely.

    Autograd accumulates into most parameters once per step, and more often with reentrant checkpointing or several
    backward passes. The counts of earlier steps tell which accumulation is the last one. `step()` encodes parameters
    with fewer accumulations than expected, or with none.

    The forward hooks of the model hold the only strong reference. Hooks of parameters hold weak references, because the
    garbage collector cannot traverse them.
    """

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
        _torch_compat.disable_static_graph_all_reduce(model)
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward, always_call=True),
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        optimizer._after_step.append(self._after_step)
        for position, p in enumerate(optimizer._flat_params):
            if p in names:
                self._hooks.append(_register_gradient_hook(p, weakref.ref(self), position))

    def detach(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._optimizer._after_step.remove(self._after_step)

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

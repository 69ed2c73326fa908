"""Inside DDP: who calls the optimizer, and when.

DDP stays in charge of everything but the gradients. It believes that every backward runs under its own `no_sync()`, so
that it neither copies gradients into its buckets nor back, and fills in nothing for unused parameters. The optimizer
encodes a parameter's gradient the moment autograd has accumulated it, on the thread that computed it and while it is
warm in the cache, and its lanes exchange the bits while backward goes on. `.grad` stays the local gradient.
"""

# No `from __future__ import annotations` here: DDP inspects the annotations of its hook and wants types, not strings.
import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

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

    DDP no longer averages gradients; the optimizer exchanges its bits while backward runs. Results are equal, to the
    bit, to those without `attach` on a model that nobody averages.

    `no_sync()` accumulates as ever. From the second step on gradients are encoded as backward produces them, and what
    changes `.grad` between backward and `step()`, such as `clip_grad_norm_`, has no effect on the step; do not rely on
    it either way. What DDP itself sends, such as buffers in forward, is not thinwire's: a rank that is lost there is an
    error of torch's.

    Args:
        model: a DistributedDataParallel model, all of whose trainable parameters the optimizer holds.
        optimizer: of thinwire.
        overlap: exchange during backward; otherwise in `step()`.
        grad_scaler: the torch.amp.GradScaler in use, if any: gradients must be unscaled before they are averaged over
            time, and backward is before `scaler.step()`. What overflows on one rank then lowers the scale on all.

    Raises:
        TypeError: for a model that is not DistributedDataParallel, or an optimizer that is not thinwire's.
        ValueError: when optimizer and model do not fit.
        ValueError: on every rank, when the ranks of nodes cannot be told, or are unequally many.
        RuntimeError: when the model has a communication hook already, or, on every rank, when ranks disagree on the
            optimizer's class, its hyper-parameters, the parameters' names, shapes or dtypes, the version or the seed.
    """
    if not isinstance(model, DistributedDataParallel):
        compiled = isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel)
        raise TypeError(
            f"attach: model is {type(model).__name__}, expected torch.nn.parallel.DistributedDataParallel. "
            + ("Attach first, and compile then" if compiled else "Without DDP step() exchanges by itself")
        )
    if not isinstance(optimizer, WireOptimizer):
        raise TypeError(
            f"attach: optimizer is {type(optimizer).__module__}.{type(optimizer).__name__}, expected one of "
            "thinwire's, for example thinwire.Birder"
        )
    _refuse_what_does_not_fit(model, optimizer)
    names = {p: name for name, p in model.module.named_parameters()}
    optimizer._prepare(names)
    # From here on all ranks are known to be equal, so whatever is refused is refused by all.
    model.register_comm_hook(None, _never_called)
    _refuse_join(model)
    previous = _watches.get(model.module)
    watch_of_before = previous() if previous is not None else None
    if watch_of_before is not None:
        # The module was attached before, inside another DistributedDataParallel: its old optimizer is to hear no more.
        watch_of_before.detach()
    watch = _Watch(model, optimizer, names, grad_scaler, overlap=overlap)
    _watches[model.module] = weakref.ref(watch)


def _refuse_what_does_not_fit(model: DistributedDataParallel, optimizer: WireOptimizer) -> None:
    if model._comm_hooks:
        raise RuntimeError(
            f"attach: the model has a communication hook already ({model._comm_hooks[0][0].__name__}), and DDP takes "
            "only one. Wrap the module in a new DistributedDataParallel, and attach once"
        )
    if model.mixed_precision is not None:
        raise ValueError(
            "attach: the model was made with mixed_precision=, which replaces parameters during backward. Use "
            "torch.autocast, or bfloat16 parameters, of which thinwire keeps fp32 masters"
        )
    ranks = torch.distributed.get_process_group_ranks(model.process_group)
    if ranks != optimizer._peers.ranks():
        raise ValueError(
            f"attach: the model's process group has ranks {ranks}, the optimizer's {optimizer._peers.ranks()}: "
            "give the optimizer process_group=model.process_group"
        )
    held = set(optimizer._flat_params)
    for name, p in model.module.named_parameters():
        if p.requires_grad and p not in held:
            raise ValueError(
                f"attach: the optimizer does not hold parameter {name!r} (or it was frozen when the optimizer was "
                "made), and DDP would no longer average its gradient. Give it to the optimizer, or freeze it with "
                "requires_grad_(False)"
            )


def _never_called(_: object, bucket: GradBucket) -> Future[Tensor]:
    # It is registered all the same: DDP then refuses another hook, which would never be called either.
    raise RuntimeError(
        f"DDP was about to exchange its bucket {bucket.index()}, but the model is attached to thinwire: was "
        "require_backward_grad_sync changed between forward and backward?"
    )


def _refuse_join(model: DistributedDataParallel) -> None:
    def join_hook(**_: Any) -> NoReturn:
        raise RuntimeError(
            "join() on a model attached to thinwire: ranks that have run out of data cannot vote. Give all ranks "
            "equally many batches, for example with DistributedSampler(drop_last=True)"
        )

    # Both DistributedDataParallel.join() and the Join context manager come through here, before anything is sent.
    model.join_hook = join_hook  # type: ignore[method-assign]


class _Watch:
    """Sees gradients as autograd accumulates them, and has them encoded when they are ready.

    How often autograd accumulates into a parameter before a step is learnt from the steps themselves: once as a rule,
    more often with reentrant checkpointing or several backward passes. The last time is when the gradient is ready.
    Parameters that come less often than that, or not at all, are left to `step()`.

    The model owns it, through its forward hooks. Hooks of parameters, which the garbage collector cannot see, only
    know it weakly.
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
        self._user_synchronises = True
        self._encodes = False
        self._expected = [0] * len(optimizer._flat_params)
        self._seen = [0] * len(optimizer._flat_params)
        self._steps_with_fewer = 0
        # With a static graph DDP puts its first exchange off to the end of backward. Tell it that this has been done.
        model._static_graph_delay_allreduce_enqueued = True
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward, always_call=True),
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        optimizer._after_step.append(self._after_step)
        for position, p in enumerate(optimizer._flat_params):
            if p in names:
                self._hooks.append(_on_gradient(p, weakref.ref(self), position))

    def detach(self) -> None:
        """Hear no more."""
        for hook in self._hooks:
            hook.remove()
        self._optimizer._after_step.remove(self._after_step)

    def _before_forward(self, *_: object) -> None:
        # DDP decides in forward whether the next backward synchronises (no_sync() must be around both), and so do we.
        if torch.is_grad_enabled():
            self._user_synchronises = self._model.require_backward_grad_sync
            self._encodes = self._overlap and self._user_synchronises
            self._model.require_backward_grad_sync = False

    def _after_forward(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self._model.require_backward_grad_sync = self._user_synchronises
            # What DDP itself notes after a forward that will synchronise: buffers are broadcast before the next one.
            self._model.require_forward_param_sync = self._user_synchronises

    def accumulated(self, position: int, p: Tensor) -> None:
        """Autograd has added to the gradient of a parameter."""
        if not self._encodes:
            return
        self._seen[position] += 1
        seen, expected = self._seen[position], self._expected[position]
        if seen == expected:
            self._optimizer._encode_early(position, self._scale())
        elif 0 < expected < seen:
            raise RuntimeError(
                f"parameter {self._names[p]!r} got a gradient {seen} times since the last step, but {expected} times "
                "before, and was sent already. Run all but the last backward of a step under no_sync(); call step() "
                "after every other one (a step whose gradients are not finite is skipped by all ranks); or attach "
                "with overlap=False"
            )

    def _scale(self) -> Scale:
        if self._grad_scaler is None or not self._grad_scaler.is_enabled():
            return 1.0
        scale = self._grad_scaler._scale
        return 1.0 / self._grad_scaler.get_scale() if scale is None else self._optimizer._inverse(scale)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._overlap and self._grad_scaler is None and hasattr(optimizer, "found_inf"):
            raise RuntimeError(
                "step() was called by a GradScaler that attach does not know, after scaled gradients were sent: "
                "use thinwire.attach(model, optimizer, grad_scaler=scaler)"
            )

    def _after_step(self) -> None:
        if self._grad_scaler is not None and self._grad_scaler.is_enabled():
            # What is infinite on one rank is skipped by all, and their scales must go down together: the scaler sees
            # this rank's gradients only.
            overflow = self._optimizer._overflow()
            for found in self._grad_scaler._found_inf_per_device(self._optimizer).values():
                if isinstance(overflow, Tensor):
                    torch.maximum(found, overflow, out=found)
                elif overflow:
                    found.fill_(1.0)
        fewer = any(0 < seen < expected for seen, expected in zip(self._seen, self._expected, strict=True))
        self._steps_with_fewer = self._steps_with_fewer + 1 if fewer else 0
        if self._steps_with_fewer == _PATIENCE:
            # What came more often was an exception, such as a trial backward before training.
            self._expected = [seen or expected for seen, expected in zip(self._seen, self._expected, strict=True)]
        else:
            self._expected = [max(pair) for pair in zip(self._seen, self._expected, strict=True)]
        self._seen = [0] * len(self._seen)

    def _after_load(self, *_: object) -> None:
        self._seen = [0] * len(self._seen)


_PATIENCE = 8
"""Steps in a row with fewer gradients than expected, after which fewer are expected."""

_watches: weakref.WeakKeyDictionary[nn.Module, weakref.ref[_Watch]] = weakref.WeakKeyDictionary()


def _on_gradient(p: Tensor, watch: weakref.ref[_Watch], position: int) -> RemovableHandle:
    def accumulated(p: Tensor) -> None:
        alive = watch()
        if alive is not None:
            alive.accumulated(position, p)

    # A parameter may be frozen for now; its hook stays and serves when it is thawed.
    frozen = not p.requires_grad
    p.requires_grad_(True)
    handle = p.register_post_accumulate_grad_hook(accumulated)
    p.requires_grad_(not frozen)
    return handle

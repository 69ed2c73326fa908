"""Gradients that are encoded while backward runs: what the attachments of DDP and FSDP2 models share.

A hook on each parameter encodes its gradient as soon as it is complete in `.grad`: on the thread that computed it,
while it is still in the cache. The lanes exchange the packets while backward continues.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from thinwire import _torch_compat
from thinwire._foreign_steps import Reservation
from thinwire.kernels.modes import Scale
from thinwire.optimizers.optimizer import WireOptimizer

_STEPS_UNTIL_FEWER = 8
"""After so many steps in a row with fewer accumulations than expected, fewer are expected."""


class EarlyEncoding:
    """Encodes each gradient when it is complete.

    Most gradients are accumulated once per step, and others more often: with reentrant checkpointing or several
    backward passes. The counts of earlier steps tell which accumulation is the last one. `step()` encodes parameters
    with fewer accumulations than expected, or with none.

    The hooks of the optimizer hold strong references. Hooks of parameters hold weak references, because the garbage
    collector cannot traverse them.

    Args:
        optimizer: encodes the gradients.
        names: of the parameters of the model.
        grad_scaler: the GradScaler in use, if any.
        owner: what has made this. The optimizer keeps it alive, so that it can be ended.
        overlap: whether to encode during backward at all.
        accumulate: how to run all but the last backward of a step, for a message.
    """

    def __init__(
        self,
        optimizer: WireOptimizer,
        names: dict[Tensor, str],
        grad_scaler: torch.amp.GradScaler | None,
        owner: object,
        *,
        overlap: bool,
        accumulate: str,
    ) -> None:
        self.optimizer = optimizer
        self._names = names
        self._grad_scaler = grad_scaler
        self._owner = owner
        self._overlap = overlap
        self._accumulate = accumulate
        self.active = overlap
        """Whether the gradients of the backward under way are encoded."""
        self._expected = [0] * len(optimizer._flat_params)
        """Accumulations per step that make a gradient complete, for each parameter; 0 if unknown."""
        self._seen = [0] * len(optimizer._flat_params)
        """Accumulations since the last step."""
        self._steps_with_fewer = 0
        """Steps in a row in which some parameter had fewer accumulations than expected."""
        self._reservation = Reservation(optimizer, names)
        self._hooks: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        optimizer._after_step.append(self._after_step)
        for position, p in enumerate(optimizer._flat_params):
            if p in names:
                self._hooks.append(_register_gradient_hook(p, weakref.ref(self), position))

    def end(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self.optimizer._after_step.remove(self._after_step)
        self._reservation.release()

    def discard_exchange(self) -> None:
        """Discard gradients that were sent and not applied. All ranks call this."""
        self.optimizer._finish_exchange()
        self.optimizer._begin_step()

    def on_accumulated(self, position: int, p: Tensor) -> None:
        """Count an accumulation into a gradient, and encode the gradient if it was the last one of the step."""
        if not self.active:
            return
        self._seen[position] += 1
        seen, expected = self._seen[position], self._expected[position]
        if seen == expected:
            self.optimizer._encode_early(position, self._scale())
            return
        self.optimizer._watch(position)
        if 0 < expected < seen:
            raise RuntimeError(
                f"parameter {self._names[p]!r} got a gradient {seen} times since the last step, but {expected} times "
                f"before, so it was sent already. Run all but the last backward of a step {self._accumulate}; call "
                "step() after every other backward, even if gradients are not finite (all ranks then skip the step); "
                "or attach with overlap=False"
            )

    def _scale(self) -> Scale:
        if self._grad_scaler is None or not self._grad_scaler.is_enabled():
            return 1.0
        scale = _torch_compat.current_scale(self._grad_scaler)
        return 1.0 / self._grad_scaler.get_scale() if scale is None else self.optimizer._inverse(scale)

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
            overflow = self.optimizer._overflow()
            for flag in _torch_compat.overflow_flags(self._grad_scaler, self.optimizer):
                if isinstance(overflow, Tensor):
                    torch.maximum(flag, overflow, out=flag)
                elif self.optimizer._delay.steps:
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


def _register_gradient_hook(p: Tensor, encoding: weakref.ref[EarlyEncoding], position: int) -> RemovableHandle:
    def on_accumulated(p: Tensor) -> None:
        alive = encoding()
        if alive is not None:
            alive.on_accumulated(position, p)

    # A frozen parameter gets its hook too: it may require gradients later. torch registers hooks only on those that do.
    frozen = not p.requires_grad
    p.requires_grad_(True)
    handle = p.register_post_accumulate_grad_hook(on_accumulated)
    p.requires_grad_(not frozen)
    return handle

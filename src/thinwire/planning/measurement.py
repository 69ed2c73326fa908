"""Measure a training step where it runs: forward, backward, and when the gradient of each parameter is complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from thinwire.planning.workload import Gradient, Workload

STEPS = 5
"""How many steps are measured. The first one is not used, because it allocates."""


class NothingMeasured(RuntimeError):
    """What should be measured did not compute gradients."""


@dataclass
class _Pass:
    """One forward and backward."""

    forward: float
    begin: float
    end: float = 0.0
    ready: dict[Tensor, float] = field(default_factory=dict)


class Recorder:
    """The forward and backward passes that it has seen, of any model in this process.

    A forward begins where the backward before it, or the optimizer's step after that, ended. What a training loop does
    in between, such as loading a batch, counts as forward.
    """

    def __init__(self) -> None:
        self.passes: list[_Pass] = []
        self._clock = _clock()
        self._idle_since = self._clock()
        self._hooked: set[Tensor] = set()

    def before_backward(self) -> None:
        """Backward begins."""
        now = self._now()
        self.passes.append(_Pass(now - self._idle_since, now))

    def after_backward(self) -> None:
        """Backward has ended."""
        self.passes[-1].end = self._idle_since = self._now()

    def after_step(self) -> None:
        """The optimizer has moved the parameters."""
        self._idle_since = self._now()

    def watch(self, parameters: Sequence[Tensor]) -> list[Any]:
        """Note when the gradients of these are complete, from now on. Returns the handles of the hooks."""
        fresh = [p for p in parameters if p.requires_grad and p not in self._hooked]
        self._hooked.update(fresh)
        return [p.register_post_accumulate_grad_hook(self._on_gradient) for p in fresh]

    def _on_gradient(self, p: Tensor) -> None:
        if self.passes and not self.passes[-1].end:
            self.passes[-1].ready[p] = self._now() - self.passes[-1].begin

    def _now(self) -> float:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return self._clock()

    def workload(self) -> Workload:
        """The medians of all passes but the first.

        Raises:
            NothingMeasured: nothing called backward, or no parameter got a gradient.
        """
        if not self.passes:
            raise NothingMeasured("backward was never called: there is no training step to measure")
        used = self.passes[1:] or self.passes
        seen = {p: None for one in used for p in one.ready}
        if not seen:
            raise NothingMeasured("backward was called, but no parameter of a module got a gradient")
        gradients = [
            Gradient(p.numel(), median(one.ready[p] for one in used if p in one.ready))
            for p in sorted(seen, key=lambda p: -median(one.ready[p] for one in used if p in one.ready))
        ]
        backward = max(median(one.end - one.begin for one in used), *(gradient.ready for gradient in gradients))
        return Workload(median(one.forward for one in used), backward, tuple(gradients))


@contextmanager
def recording(on_pass: Callable[[int], None] | None = None) -> Iterator[Recorder]:
    """Record every backward of this process inside the block.

    Args:
        on_pass: called after each backward with the number of those so far. It may raise to end the program that is
            measured.
    """
    recorder = Recorder()
    original = torch.autograd.backward
    handles: list[Any] = [register_optimizer_step_post_hook(lambda *_: recorder.after_step())]

    def backward(*arguments: Any, **options: Any) -> None:
        recorder.before_backward()
        original(*arguments, **options)
        recorder.after_backward()
        if on_pass is not None:
            on_pass(len(recorder.passes))

    def watch(module: nn.Module, _: object) -> None:
        handles.extend(recorder.watch(list(module.parameters())))

    handles.append(nn.modules.module.register_module_forward_pre_hook(watch))
    # `Tensor.backward` calls it by this name.
    torch.autograd.backward = backward
    try:
        yield recorder
    finally:
        torch.autograd.backward = original
        for handle in handles:
            handle.remove()


def measure_workload(step: Callable[[], object], steps: int = STEPS) -> Workload:
    """Measure a function that computes the loss and calls backward.

    Args:
        step: one training step. An optimizer's step at its end is not counted.
        steps: how often it is called.

    Raises:
        NothingMeasured: it did not call backward, or no parameter got a gradient.
    """
    with recording() as recorder:
        for _ in range(steps):
            step()
    return recorder.workload()


def _clock() -> Callable[[], float]:
    """With one thread, the seconds that it computes: what other processes take from it does not count."""
    on_gpu = torch.accelerator.is_available()
    return time.thread_time if torch.get_num_threads() == 1 and not on_gpu else time.perf_counter

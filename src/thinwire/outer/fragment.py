"""A fragment of the model: where replicas last agreed, how far this rank has moved since, and the outer update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.optimizers import state_dict as state_dicts
from thinwire.outer.averager import OuterAverager
from thinwire.transport.memory import untouched_zeros

_CHUNK = 1 << 16
"""The outer update runs over chunks of so many elements, which stay in a cache."""


_ENTRIES = {"reference", "momentum", "exchange", "moved", "due", "update", "dropped", "outer"}
"""Of the state of a fragment."""


def divide(params: Sequence[Tensor], fragments: int) -> list[list[int]]:
    """Divide parameters into fragments of about equal size: each goes to the smallest fragment so far, in order.

    In a model of equal layers, fragments are strided over the layers.

    Returns:
        For each fragment, the indices of its parameters, in order.

    Raises:
        ValueError: if there are fewer parameters than fragments.
    """
    if fragments > len(params):
        raise ValueError(f"fragments={fragments} for {len(params)} trainable parameters: expected at most as many")
    indices: list[list[int]] = [[] for _ in range(fragments)]
    sizes = [0] * fragments
    for index, p in enumerate(params):
        smallest = min(range(fragments), key=lambda f: (sizes[f], len(indices[f])))
        indices[smallest].append(index)
        sizes[smallest] += p.numel()
    return indices


@dataclass(frozen=True)
class OuterStep:
    """The numbers of an outer step, which all ranks have in common."""

    lr: float
    momentum: float


@dataclass(frozen=True)
class Motion:
    """Inner products of Δ of this worker and of the mean of all workers, to a few digits.

    After a `delay`, the first is that of how far this worker has moved by then.
    """

    own_and_mean: float
    own: float
    mean: float


class Fragment:
    """Some parameters, and the state of their outer update.

    The phases of an exchange: `start` encodes the update, `collect` waits for the average, `apply` moves the reference
    values and the parameters. The exchange runs in the background between the first two.

    Args:
        params: the parameters.
        make: makes the averager of the reference values.
        workspace: memory of this many elements at least, which is in use from `start` to `apply`.
    """

    def __init__(
        self, params: Sequence[Tensor], make: Callable[[Sequence[Tensor]], OuterAverager], workspace: Tensor
    ) -> None:
        self.params = params
        sizes = [p.numel() for p in params]
        device = workspace.device
        self.reference = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        """Where replicas last agreed, in float32, parameter after parameter."""
        self.momentum = untouched_zeros(sum(sizes), torch.float32, device)  # which stay so without momentum
        self.update = workspace[: sum(sizes)]
        """How far this rank has moved, then how far all ranks have moved in the mean."""
        self._updates = self.update.split(sizes)
        self.references = [
            nn.Parameter(part.view(p.shape)) for part, p in zip(self.reference.split(sizes), params, strict=True)
        ]
        self.averager = make(self.references)
        self.due: int | None = None
        """The inner step after which the update is applied, while one is under way."""
        self._outer = OuterStep(0.0, 0.0)
        self._collected = False
        """Whether `update` is the average."""
        self._dropped = False
        """Whether some rank's update was not finite."""
        self.moved = False
        """Whether this rank has taken inner steps since its parameters had the reference values."""
        self._measured = False
        """Whether `update` has how far this rank has moved, before `start`."""
        self._own_square = 0.0
        self.motion: Motion | None = None
        """How far this rank and the mean of all have moved, in the last exchange that was applied."""

    def take_references(self) -> None:
        """Begin from the parameters as they are, which must be equal on all ranks."""
        for reference, p in zip(self.references, self.params, strict=True):
            reference.data.copy_(p)

    def set_parameters(self, values: Sequence[Tensor]) -> None:
        """Write the parameters of this rank."""
        for p, value in zip(self.params, values, strict=True):
            p.copy_(value)

    def exchange_with(self, make: Callable[[Sequence[Tensor]], OuterAverager]) -> None:
        """Take another averager, which knows other ranks. What the old one has left out of its packets is lost."""
        self.averager.release()
        self.averager = make(self.references)

    # An exchange -----------------------------------------------------------------------------------------------------

    def measure(self) -> float:
        """Before `start`, compute how far the parameters have moved. Returns ‖Δ‖²."""
        for index in range(len(self.params)):
            self._subtract(index)
        self._measured = True
        self._own_square = _dot(self.update, self.update)
        return self._own_square

    def start(self, due: int, common: Mapping[str, int], outer: OuterStep, weight: float = 1.0) -> None:
        """Encode how far the parameters have moved. All ranks call this after the same inner step of an interval.

        Args:
            due: the number of inner steps of this rank after which it is applied.
            common: numbers on which all ranks must agree.
            outer: the numbers of the outer step.
            weight: what the update of this rank is multiplied by.
        """
        if weight != 1.0 and not self._measured:
            self.measure()
        averager = self.averager
        averager.agree_on(outer_lr=outer.lr, outer_momentum=outer.momentum, **common)
        averager.begin()
        for index, (reference, update) in enumerate(zip(self.references, self._updates, strict=True)):
            if not self._measured:
                self._subtract(index)
            if weight != 1.0:
                update.mul_(weight)
            # A parameter that did not move is not in the packets: signs have no zero.
            averager.add(reference, update, present=has_values(update))
        averager.leave()
        if not self._measured:
            self._own_square = _dot(self.update, self.update)
        self._measured = False
        self.due, self._outer = due, outer
        self._collected = self._dropped = False

    def _subtract(self, index: int) -> None:
        reference, p = self.references[index], self.params[index]
        moved = self._updates[index].view(p.shape)
        if p.dtype == torch.float32:
            torch.sub(reference, p, out=moved)
        else:
            # Not minus the reference itself: it has more digits than the parameter began with.
            moved.copy_(reference.to(p.dtype)).sub_(p)

    def collect(self) -> None:
        """Wait for the average, if that has not been done. It does not matter when."""
        if self.due is None or self._collected:
            return
        self.averager.finish()
        self._collected, self._dropped = True, self.averager.overflowed

    def abandon(self) -> None:
        """Forget the exchange under way, which failed. The parameters and their reference values are as before it."""
        self.due, self._collected, self._measured = None, False, False

    def apply(self, mix: float, *, reset_error: bool = False) -> None:
        """Take the outer step, and move the parameters to `mix` times themselves plus `1 - mix` times the reference.

        If some rank's update was not finite, the parameters return to the reference values on all ranks instead.

        Args:
            mix: see above.
            reset_error: move what the message of this rank has left out from the residual into the parameters.
        """
        self.collect()
        self.due = None
        if self._dropped:
            mix = 0.0
        else:
            self.motion = self._motion()
            self._take_outer_step()
        if mix == 0.0:
            self.set_parameters(self.references)
        else:
            for reference, p in zip(self.references, self.params, strict=True):
                p.copy_((p * mix if p.dtype == torch.float32 else p.float() * mix).add_(reference * (1.0 - mix)))
        self.moved = mix != 0.0
        if reset_error:
            self._reset_error()

    def _reset_error(self) -> None:
        for reference, p in zip(self.references, self.params, strict=True):
            if self._dropped:
                self.averager.forget_residual(reference)
            else:
                self.averager.take_residual(reference, p)
        self.moved = self.averager.keeps_residual and not self._dropped

    def _motion(self) -> Motion:
        # Without a copy of Δ: it is where the average is now.
        left = sum(_dot(p.float().reshape(-1), u) for p, u in zip(self.params, self._updates, strict=True))
        return Motion(_dot(self.reference, self.update) - left, self._own_square, _dot(self.update, self.update))

    def _take_outer_step(self) -> None:
        """SGD with Nesterov momentum. Products are rounded before they are added, so that all machines agree."""
        lr, momentum = self._outer.lr, self._outer.momentum
        for reference, velocity, update in self._chunks():
            if momentum:
                velocity.mul_(momentum).add_(update)
                reference.sub_((velocity * momentum).add_(update).mul_(lr))
            else:
                reference.sub_(update * lr)

    def _chunks(self) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(whole.split(_CHUNK) for whole in (self.reference, self.momentum, self.update)), strict=True)

    # Saving ----------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What must be saved, after `collect`."""
        under_way = self.due is not None
        return {
            "reference": self.reference,
            "momentum": self.momentum,
            "exchange": self.averager._state_of_this_rank(),
            "moved": self.moved,
            "due": self.due,
            "update": self.update if under_way else None,
            "dropped": self._dropped,
            "outer": (self._outer.lr, self._outer.momentum),
        }

    def check(self, state: Any) -> None:
        """Check what `load` will be given.

        Raises:
            ValueError: if it does not fit.
        """
        if not isinstance(state, dict) or not state.keys() >= _ENTRIES:
            raise ValueError(f"a fragment of the state dict is {state!r:.80}: expected {', '.join(sorted(_ENTRIES))}")
        for name in ("reference", "momentum") + (("update",) if state["due"] is not None else ()):
            value, own = state[name], self.reference
            if not isinstance(value, Tensor) or value.shape != own.shape or value.dtype != own.dtype:
                what = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)[:40]
                raise ValueError(
                    f"{name!r} of a fragment is {what} in the state dict, this LocalSteps needs {tuple(own.shape)} of "
                    f"{own.dtype}: was it saved with another model, or with other `fragments`?"
                )
        state_dicts.check(self.averager, state["exchange"])

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned, on the same rank of a run with as many ranks."""
        self.reference.copy_(state["reference"])
        self.momentum.copy_(state["momentum"])
        self.averager.load_state_dict(state["exchange"])
        self.moved, self.due, self._dropped = state["moved"], state["due"], state["dropped"]
        self._outer = OuterStep(*state["outer"])
        self._collected = self.due is not None
        if self._collected:
            self.update.copy_(state["update"])


def has_values(vector: Tensor) -> bool:
    """Whether an element is not zero, NaN included. Ten times as fast as `any()`."""
    return bool(vector.numel()) and any(float(extreme) != 0.0 for extreme in torch.aminmax(vector))


def _dot(one: Tensor, other: Tensor) -> float:
    return float(torch.dot(one, other))

"""Update rules that average gradients: the answer becomes the gradient, and parameters stay as they are."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire._checks import is_number
from thinwire.compressors.gradient_compressor import GradientCompressor, Scheme
from thinwire.compressors.kept_answers import NAME, KeptMean, kept_mean
from thinwire.compressors.lossless import LosslessScheme
from thinwire.compressors.quantized import Quantized
from thinwire.kernels.modes import Scale
from thinwire.optimizers.rule import Context, Group, UpdateRule
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.memory import HOST
from thinwire.transport.state import State, Tensors

_CHANNEL = "gradients"


def _loss_scales(tensor: Tensor, step: int) -> str | None:
    """Check loss scales."""
    fine = all(0 < value < math.inf for value in tensor.tolist())
    return None if fine else "has a loss scale that is not a positive number"


class AveragingRule(UpdateRule):
    """What all of them share: where gradients are, and the loss scale that they have.

    Args:
        name: the name of the compressor.
        residual_decay: what residuals are multiplied by before each exchange, in [0, 1].

    Raises:
        ValueError: if `residual_decay` is not in [0, 1].
    """

    moves_parameters = False
    worker_residual = False
    """Whether workers keep what their own messages leave out, element by element."""
    buckets = 8  # packets are larger than those of signs, so a slow link should start earlier

    def __init__(self, name: str, residual_decay: float = 1.0) -> None:
        if not is_number(residual_decay) or not 0 <= residual_decay <= 1:
            raise ValueError(f"residual_decay={residual_decay!r}: expected a number in [0, 1]")
        self._name = name
        self._residual_decay = residual_decay
        self.gradients: list[Tensor | None] = []
        """By position, the memory of the gradient that is exchanged, as a vector."""

    def check_group(self, group: Group) -> None:
        """See `UpdateRule`. Groups have no hyper-parameters."""

    def settings(self) -> dict[str, Any]:
        """See `UpdateRule`."""
        return {"the compressor": self._name, "residual_decay": self._residual_decay, **self.options()}

    @abc.abstractmethod
    def options(self) -> dict[str, Any]:
        """The options of the compressor."""

    @abc.abstractmethod
    def rescale(self, factor: float) -> None:
        """Multiply the residuals by a factor."""

    def begin_run(self, context: Context) -> State:
        """Bind the rule to a run. Returns the state that all of these rules have."""
        self.context = context
        self.gradients = [None] * len(context.params)
        self._loss_scale = torch.ones(1, dtype=torch.float64, device=HOST)
        self._kept_scale = torch.ones(1, dtype=torch.float64, device=HOST)
        """With a delay, the loss scale of the mean that is kept."""
        state = State(common={"loss_scale": self._loss_scale}, checks={"loss_scale": _loss_scales})
        if context.delayed:
            name = f"{NAME}_loss_scale"
            state.include(State(common={name: self._kept_scale}, checks={name: _loss_scales}))
        return state

    def use_loss_scale(self, scale: float) -> None:
        """Convert the residuals to the scale of the next gradients: exactly, if scales are powers of two, as usual.

        Raises:
            ValueError: if the scale is not a positive number: the GradScaler has lowered it too often.
        """
        if not 0 < scale < math.inf:
            raise ValueError(f"the scale of the GradScaler is {scale}: expected a positive number")
        factor = scale / float(self._loss_scale)
        if factor != 1.0:
            self.rescale(factor)
            self._loss_scale.fill_(scale)

    def before_exchange(self) -> None:
        """See `UpdateRule`."""
        if self._residual_decay != 1.0:
            self.rescale(self._residual_decay)

    def gradient_at(self, position: int) -> Tensor:
        """The memory of the gradient of a parameter."""
        gradient = self.gradients[position]
        assert gradient is not None, "all gradients are given before the exchange ends"
        return gradient


class ElementwiseRule(AveragingRule):
    """Sends gradients through a compressor whose packets hold the elements of a shard.

    Args:
        name: the name of the compressor.
        scheme: the compressor and its options.
        residual_decay: see `AveragingRule`.
    """

    compressor: GradientCompressor
    no_delay = None

    def __init__(self, name: str, scheme: Scheme, residual_decay: float = 1.0) -> None:
        super().__init__(name, residual_decay)
        if scheme.no_decay is not None and residual_decay != 1.0:
            raise ValueError(
                f"residual_decay={residual_decay!r} with compressor {name!r}, which {scheme.no_decay}: expected 1.0"
            )
        self._scheme = scheme
        self.worker_residual = scheme.worker_residual
        self._kept: KeptMean | None = None
        self.state_depends_on_buckets = scheme.state_depends_on_buckets

    def options(self) -> dict[str, Any]:
        """See `AveragingRule`."""
        return self._scheme.settings()

    def bind(self, context: Context) -> tuple[dict[str, Compressor], State]:
        """See `UpdateRule`."""
        state = self.begin_run(context)
        # With a single worker nothing leaves the node.
        scheme = self._scheme if context.topology.workers > 1 else LosslessScheme()
        self.compressor = scheme.bind(context.layout, context.topology.node, context.kernels)
        self._joinable = isinstance(self.compressor, Quantized)
        self.encode_numbers = () if self._joinable else None
        state.include(self.compressor.state())
        self._kept = kept_mean(context.layout, self.compressor) if context.delayed else None
        if self._kept is not None:
            state.include(self._kept.state())
        return {_CHANNEL: self.compressor}, state

    def compared_state(self) -> Tensors:
        """See `UpdateRule`."""
        if self._kept is None:
            return {}
        kept = self._kept.state()
        return {**kept.words, **kept.whole}

    def rescale(self, factor: float) -> None:
        """See `AveragingRule`."""
        self.compressor.rescale(factor)

    def begin_step(self) -> None:
        """See `UpdateRule`."""
        self.compressor.begin_step(self.context.step)

    def channel(self) -> str:
        """See `UpdateRule`."""
        return _CHANNEL

    def encode(self, position: int, part: Part, grad: Tensor | None, group: Group, scale: Scale) -> bool | None:
        """See `UpdateRule`."""
        return self.compressor.encode(part, grad, scale)

    def settle(self, flags: int) -> int:
        """See `UpdateRule`."""
        self.compressor.read_answers()
        return flags

    def keep(self) -> None:
        """See `UpdateRule`."""
        assert self._kept is not None, "only with a delay"
        self._kept.keep(self.context.session.channel.buffers)
        self._kept_scale.copy_(self._loss_scale)

    def apply(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: Group) -> None:
        """See `UpdateRule`. A mean that was kept gets the loss scale of the gradients that it replaces."""
        gradient = self.gradient_at(position)
        if self._kept is not None:
            self._kept.read(position, parts, gradient)
            factor = float(self._loss_scale) / float(self._kept_scale)
            if factor != 1.0:
                gradient.mul_(factor)
            return
        for part in parts:
            self.compressor.decode(part, gradient)

    @property
    def apply_numbers(self) -> Sequence[str] | None:
        """See `UpdateRule`. A mean that was kept has tables of its own."""
        return () if self._joinable and self._kept is None else None

    def targets(self) -> Sequence[Tensor | None]:
        """See `UpdateRule`."""
        return self.gradients

    def apply_joined(self, positions: Sequence[int], part: Part, x: Tensor, group: Group) -> bool:
        """See `UpdateRule`."""
        self.compressor.decode(part, x)
        return True

    def contraction(self) -> float:
        """See `UpdateRule`."""
        return self.compressor.contraction()

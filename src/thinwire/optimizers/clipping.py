"""Clipping of each rank's own gradients when they are encoded: `clip_value` and `clip_norm`.

Under `attach`, gradients are sent while backward runs. The norm of the whole gradient is known only after that, so
`torch.nn.utils.clip_grad_norm_` comes too late. Here each parameter has its part of the limit, which is known before::

    g_p ← clamp(g_p, -clip_value, clip_value)                            each element
    g_p ← g_p · min(1, τ_p / ‖g_p‖₂)                                     τ_p = clip_norm · √((q_p + d_p/d) / 2)
    q_p ← 0.9 q_p + 0.1 ‖g_p‖₂² / Σ ‖g‖₂²         at the end of a step, with the norms before `clip_norm`

d_p of the d elements belong to parameter p, and q_p is its average share of the squared norm, d_p/d at first. All q_p
add up to 1, and so do all (q_p + d_p/d)/2. So the norm of the whole gradient is at most `clip_norm`, as with global
clipping. A gradient that is large in all parameters is multiplied by nearly the same factor everywhere, and one that is
large in a single parameter is clipped there only. The second half of the share is for parameters that had no gradient
so far.

The factor becomes part of the scale that the encoder multiplies gradients by in any case. `clip_norm` costs one pass
that reads the gradient, while parts of it are still in the cache. `clip_value` costs a copy of the gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.modes import Scale
from thinwire.kernels.ops import Kernels
from thinwire.transport.layout import Layout
from thinwire.transport.state import State

DECAY = 0.9
"""Of the shares. A spike in one step changes a share by at most a tenth."""
CHUNK = 2**20
"""Elements that are squared, or clamped, at once; sums of squares are added chunk by chunk."""
SHARE = "clip_share"
"""The name of q_p in the state of a parameter."""


class Clipping:
    """Clips the gradients of one rank.

    Args:
        norm: the argument `clip_norm`; None for no limit.
        value: the argument `clip_value`; None for no limit.

    Raises:
        ValueError: naming the argument.
    """

    def __init__(self, norm: float | None, value: float | None) -> None:
        for name, limit in (("clip_norm", norm), ("clip_value", value)):
            if limit is not None and (
                not isinstance(limit, (int, float)) or isinstance(limit, bool) or not 0 < limit < math.inf
            ):
                raise ValueError(f"{name}={limit!r}: expected a number > 0, or None for no clipping")
        self.norm, self.value = norm, value
        self.loss_scale = 1.0
        """What gradients are multiplied by even after the scale that they are encoded with; both limits follow it."""

    @property
    def clips(self) -> bool:
        """Whether there is any limit."""
        return self.norm is not None or self.value is not None

    def settings(self) -> dict[str, Any]:
        """The limits on which all ranks must agree."""
        limits = {"clip_norm": self.norm, "clip_value": self.value}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def bind(self, layout: Layout, kernels: Kernels) -> State:
        """Allocate what a run needs. Returns the state to be saved."""
        self._kernels = kernels
        on_device = {"dtype": torch.float64, "device": layout.device}
        sizes = torch.tensor([slot.numel for slot in layout.slots], **on_device)
        self._sizes = sizes / max(1, sum(slot.numel for slot in layout.slots))
        self._shares = self._sizes.clone()
        longest = max((slot.numel for slot in layout.slots), default=0)
        clamped = longest if self.value is not None else 0
        self._clamped = torch.empty(clamped, dtype=torch.float32, device=layout.device)
        chunk = min(longest, CHUNK) if self.clips else 0
        self._chunk = torch.empty(chunk, dtype=torch.float32, device=layout.device)
        if self.norm is None:
            return State()
        return State(layers={SHARE: self._shares}, checks={SHARE: _fractions}, differing=[SHARE])

    def begin_step(self) -> None:
        """Compute the limits of a step from the shares."""
        self._squares: list[float | Tensor] = [0.0] * len(self._sizes)
        self._limits: list[Any] = []
        if self.norm is not None and len(self._sizes):
            limits = self.norm * ((self._shares / _sum(self._shares) + self._sizes) / 2).sqrt()
            self._limits = limits.tolist() if limits.device.type == "cpu" else list(limits.unbind())

    def clip(self, position: int, grad: Tensor, scale: Scale) -> tuple[Tensor, Scale]:
        """Clip the gradient of a parameter.

        Args:
            position: of the parameter.
            grad: its gradient, dense.
            scale: what it is multiplied by when it is encoded.

        Returns:
            The gradient and the scale to encode.
        """
        flat = grad.detach().as_strided((grad.numel(),), (1,))
        if self.value is not None:
            flat, scale = self._clamp(flat, scale, self.value * self.loss_scale), 1.0
        if self.norm is not None:
            square = self._square_sum(flat)
            self._squares[position] = square * (scale / self.loss_scale) ** 2
            scale = _limited(square, scale, self._limits[position] * self.loss_scale)
        return flat, scale

    def _clamp(self, flat: Tensor, scale: Scale, limit: float) -> Tensor:
        clamped = self._clamped[: flat.numel()]
        for source, to in zip(flat.split(CHUNK), clamped.split(CHUNK), strict=True):
            torch.mul(source, scale, out=to)
            # Infinity stays infinite, for a GradScaler, and all ranks skip the step.
            nonfinite = torch.sub(to, to, out=self._chunk[: to.numel()])
            to.clamp_(-limit, limit).add_(nonfinite)
        return clamped

    def _square_sum(self, flat: Tensor) -> float | Tensor:
        square: float | Tensor = 0.0
        for chunk in flat.split(CHUNK):
            if chunk.dtype != torch.float32:
                chunk = self._chunk[: chunk.numel()].copy_(chunk)
            square = square + self._kernels.square_sum(chunk)
        return square

    def end_step(self) -> None:
        """Update the shares by the norms of this step; not if they are all 0, or one of them is not finite."""
        if self.norm is None or not self._squares:
            return
        if self._shares.device.type == "cpu":
            squares = torch.tensor(self._squares, dtype=torch.float64, device=self._shares.device)
        else:
            squares = torch.stack([torch.as_tensor(each).to(self._shares) for each in self._squares])
        total = _sum(squares)
        shares = DECAY * self._shares + (1 - DECAY) * (squares / total)
        self._shares.copy_(torch.where((total > 0) & (total < math.inf), shares, self._shares))


def _limited(square: float | Tensor, scale: Scale, limit: Any) -> Scale:
    """The scale that limits the norm of a gradient with this sum of squares; NaN if the sum overflows, for a step that
    all ranks skip."""
    if isinstance(square, Tensor) or isinstance(scale, Tensor):
        length = torch.as_tensor(square).sqrt() * scale
        limited = torch.where(length > limit, scale * (limit / length), torch.as_tensor(scale, dtype=torch.float64))
        return torch.where(length < math.inf, limited, math.nan).to(torch.float32)
    length = math.sqrt(square) * scale
    if not length < math.inf:
        return math.nan
    return scale * (limit / length) if length > limit else scale


def _sum(values: Tensor) -> Tensor:
    """The sum of a vector, halves added to halves, so that it is the same on all devices."""
    count = 1 << max(0, len(values) - 1).bit_length()
    sums = torch.nn.functional.pad(values, (0, count - len(values)))
    while len(sums) > 1:
        first, second = sums.chunk(2)
        sums = first + second
    return sums[0]


def _fractions(tensor: Tensor, step: int) -> str | None:
    """Check shares."""
    fine = all(0 <= value <= 1 for value in tensor.flatten().tolist())
    return None if fine else "has a share that is not in [0, 1]"

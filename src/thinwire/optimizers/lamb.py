"""LAMB: Adam's direction, with a step size per layer in proportion to the norm of its weights.

Yang You, Jing Li, Sashank Reddi, Jonathan Hseu, Sanjiv Kumar, Srinadh Bhojanapalli, Xiaodan Song, James Demmel, Kurt
Keutzer, Cho-Jui Hsieh: "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes". ICLR 2020.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.compressors.dense import Dense
from thinwire.compressors.kept_answers import KeptWords
from thinwire.kernels.modes import Scale
from thinwire.kernels.ops import Kernels
from thinwire.optimizers.adam import (
    DENSE,
    SQUARABLE,
    AdamMoments,
    Floats,
    adam_defaults,
    check_adam_group,
    correction,
    root_correction,
    signed,
)
from thinwire.optimizers.optimizer import Unpack, WireOptimizer, WireOptions
from thinwire.optimizers.rule import Context, Group, UpdateRule
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.state import State, Tensors


class Lamb(WireOptimizer):
    r"""LAMB (You et al., ICLR 2020): layer-wise steps for large batches; gradients are averaged exactly.

    This is the warm-up of `thinwire.OneBitLamb`, for comparisons and for fast networks. With Adam's averages of the
    mean gradient g, for each parameter tensor::

        m ← β1 m + (1-β1) g        v ← β2 v + (1-β2) g²        r = m̂ / (√v̂ + ε) + λ x
        c = clamp(‖x‖ / ‖r‖, min_coeff, max_coeff)             x ← x - lr · c · r

    Example::

        model = DDP(net)
        opt = thinwire.Lamb(model.parameters(), lr=5e-3)
        thinwire.attach(model, opt)
        ...
        loss.backward(); opt.step(); opt.zero_grad()

    Args:
        params: parameters or parameter groups, as in torch.optim. Groups may have their own `lr`, `betas`, `eps`,
            `weight_decay` and `maximize`. A layer is one parameter tensor.
        lr: step size, relative to the norm of a layer's weights.
        betas: decay of the momentum and of the variance.
        eps: added to √v̂.
        weight_decay: decay λ, as a part of the direction r.
        min_coeff: the smallest factor c of a layer.
        max_coeff: the largest factor c of a layer.
        maximize: ascend instead of descend.
        process_group: the ranks that train together; the default group if None.
        topology: "flat", "hierarchical" or "auto", as in `thinwire.Birder`.
        mesh: a two-dimensional DeviceMesh of the same ranks, one row per node, if LOCAL_WORLD_SIZE is not set.
        node_dtype: the dtype of gradients on the link inside a node: torch.float32, or torch.bfloat16 for half the
            bytes.
        bucket_mb: the size of a bucket, in megabytes of fp32 gradient. None: a quarter of the model, but at least 4 and
            at most 32.
        max_consecutive_skips: `step()` raises TooManySkips after this many skipped steps in a row. All ranks skip a
            step if a gradient on any rank is not finite. None: never.
        check_replicas_every: compare a hash of the parameters across all ranks every this many steps; 0 for never.
        clip_norm: clip this rank's own gradient to this norm, as in `thinwire.Birder`. None: no limit.
        clip_value: clip each element of this rank's own gradient to [-clip_value, clip_value]. None: no limit.
        delay: 1 to apply the answer of each step in the next one, as in `thinwire.Birder`: step t updates m and v with
            the mean gradient of step t-1. x, from which λx and c are computed, the learning rate and the weight decay
            are those of step t. Costs 4 bytes per parameter for that gradient, as in `thinwire.compress` with "none".

    When not to use it:
        To save bytes: it sends 32 bits per parameter, as DDP does. With ordinary batch sizes AdamW is as good.

    Gradient clipping:
        Use `clip_norm` or `clip_value`. A spike stays in the averages for many steps. Under `attach`, `clip_grad_norm_`
        would come after gradients were sent, and `step()` raises GradientChanged. Without `attach` it works too, and
        clips this rank's own gradient.

    Differences from the paper:
        * c is 1 (before clamping) if the weights or the direction are all zero.
        * A coordinate that never had a gradient (v = 0) neither moves nor decays.
        * A gradient above 2⁶⁰ counts as not finite, because its square would stay in the variance.
        * `delay` is an addition.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        maximize: bool = False,
        **wire: Unpack[WireOptions],
    ) -> None:
        check_range("min_coeff", min_coeff, "max_coeff", max_coeff)
        rule = LambRule((min_coeff, max_coeff))
        super().__init__(params, adam_defaults(lr, betas, eps, weight_decay, maximize=maximize), rule, **wire)


class LambRule(UpdateRule):
    """The update rule of `Lamb`.

    Args:
        coeffs: the smallest and the largest factor c of a layer.
    """

    records_buckets = True
    no_delay = None
    needs_whole = "the norms of whole layers"

    def __init__(self, coeffs: tuple[float, float]) -> None:
        self._coeffs = coeffs

    def check_group(self, group: Group) -> None:
        """See `UpdateRule`."""
        check_adam_group(group)

    def settings(self) -> dict[str, Any]:
        """See `UpdateRule`."""
        return {"min_coeff": self._coeffs[0], "max_coeff": self._coeffs[1]}

    def bind(self, context: Context) -> tuple[dict[str, Compressor], State]:
        """See `UpdateRule`."""
        self.context = context
        state = State()
        self._adam = AdamMoments(context, state)
        self._dense = Dense(context.kernels)
        self._kept = KeptWords(context.layout, Dense.payload.word_bytes) if context.delayed else None
        if self._kept is not None:
            state.include(self._kept.state())
        return {DENSE: self._dense}, state

    def compared_state(self) -> Tensors:
        """See `UpdateRule`."""
        return {"v": self._adam.v} | ({} if self._kept is None else self._kept.state().words)

    def channel(self) -> str:
        """See `UpdateRule`."""
        return DENSE

    def encode(self, position: int, part: Part, grad: Tensor | None, group: Group, scale: Scale) -> bool | None:
        """See `UpdateRule`."""
        return self._dense.encode(part, grad, signed(scale, group), SQUARABLE)

    def keep(self) -> None:
        """See `UpdateRule`."""
        assert self._kept is not None, "only with a delay"
        self._kept.keep(self.context.session.channel.buffers)

    def _gradient(self, part: Part) -> tuple[Tensor, Tensor]:
        """The mean gradient that this step applies; see `Floats`."""
        return self._dense.answer_floats(part) if self._kept is None else (self._kept.runs(part), self._kept.memory)

    def apply(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: Group) -> None:
        """See `UpdateRule`."""
        adam = self._adam
        adam.updates.now[position] += 1
        updates, kernels = adam.updates.now[position], self.context.kernels
        lamb_step(kernels, parts, x, low, adam.m, adam.v, self._gradient, group, updates, self._coeffs)


def lamb_step(
    kernels: Kernels,
    parts: Sequence[Part],
    x: Tensor,
    low: Tensor | None,
    m: Tensor,
    v: Tensor,
    gradient: Floats,
    group: Group,
    updates: int,
    coeffs: tuple[float, float],
) -> tuple[float, float]:
    """Take LAMB's step for one parameter with its mean gradient, after `updates` updates, this one included.

    Returns:
        The parameter's factor c, and the sum of its v.
    """
    beta1, beta2 = group["betas"]
    direction = {
        "eps": group["eps"],
        "unbias": correction(beta1, updates),
        "correction": root_correction(beta2, updates),
        "weight_decay": group["weight_decay"],
    }
    measured: list[list[float]] = []
    for part in parts:
        runs, floats = gradient(part)
        sums = torch.zeros(runs.shape[0], 3, dtype=torch.float64, device=x.device)
        kernels.lamb_measure(runs, x, low, m, v, floats, beta1=beta1, beta2=beta2, **direction, sums=sums)
        measured += sums.tolist()
    size, length = norms([row[:2] for row in measured])
    coefficient = clamp(size / length if size > 0 and length > 0 else 1.0, *coeffs)
    for part in parts:
        kernels.lamb_apply(part.down_runs, x, low, m, v, **direction, rate=float(group["lr"]) * coefficient)
    return coefficient, math.fsum(row[2] for row in measured)


def norms(squares: Sequence[Sequence[float]]) -> list[float]:
    """One norm per column, given rows of partial sums of squares."""
    return [math.sqrt(math.fsum(column)) for column in zip(*squares, strict=True)]


def clamp(value: float, low: float, high: float) -> float:
    """The number in [low, high] that is nearest to `value`."""
    return min(max(value, low), high)


def check_range(low_name: str, low: float, high_name: str, high: float) -> None:
    """Reject limits that are not in order.

    Raises:
        ValueError: naming the arguments.
    """
    if not 0 < low <= high < math.inf:
        raise ValueError(f"{low_name}={low!r} and {high_name}={high!r}: expected 0 < {low_name} <= {high_name}")

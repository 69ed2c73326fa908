"""LAMB: Adam's direction with a step for each layer that follows the size of its weights.

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
from thinwire.kernels.modes import Scale
from thinwire.kernels.ops import Kernels
from thinwire.optimizers.adam import (
    DENSE,
    SQUARABLE,
    AdamMoments,
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

    What `thinwire.OneBitLamb` does in its warm-up, for those who want to compare, or whose network is fast. With Adam's
    averages of the mean gradient g, for each parameter tensor::

        m ← β1 m + (1-β1) g        v ← β2 v + (1-β2) g²        r = m̂ / (√v̂ + ε) + λ x
        c = clamp(‖x‖ / ‖r‖, min_coeff, max_coeff)             x ← x - lr · c · r

    Args:
        params: parameters or groups of them, as in torch.optim. Groups may have their own `lr`, `betas`, `eps`,
            `weight_decay` and `maximize`. A layer is a parameter tensor.
        lr: step size, relative to the size of a layer's weights.
        betas: decay of the momentum and of the variance.
        eps: added to √v̂.
        weight_decay: decay λ, as a part of the direction r.
        min_coeff: the least factor c of a layer.
        max_coeff: the largest.
        maximize: ascend instead of descend.
        process_group: the ranks that train together; the default group if None.
        topology: "flat", "hierarchical" or "auto", as in `thinwire.Birder`.
        mesh: a two-dimensional DeviceMesh of the same ranks, a row a node, where LOCAL_WORLD_SIZE does not tell.
        node_dtype: of gradients on the link inside a node: torch.float32, or torch.bfloat16 for half the bytes.
        bucket_mb: size of an exchange, in megabytes of fp32 gradient; if None a quarter of the model, within 4 to 32.
        max_consecutive_skips: after so many steps in a row that were skipped for gradients that are not finite, step()
            raises TooManySkips; None for never.
        check_replicas_every: compare a hash of the parameters over all ranks after every so many steps; 0 for never.

    When not to use it:
        To save bytes: it sends 32 bits a parameter, as DDP does. With ordinary batches AdamW is as good.

    Differences from the paper:
        * A factor c of 1 (before it is clamped) where the weights or the direction are all zero.
        * A coordinate that has never had a gradient (v = 0) neither moves nor decays.
        * A gradient of more than 2⁶⁰ counts as one that is not finite: its square would stay in the variance.
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
        coeffs: the least and the largest factor c of a layer.
    """

    records_buckets = True

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
        return {DENSE: self._dense}, state

    def shared_state(self) -> Tensors:
        """See `UpdateRule`."""
        return {"v": self._adam.v}

    def channel(self) -> str:
        """See `UpdateRule`."""
        return DENSE

    def encode(self, position: int, part: Part, grad: Tensor | None, group: Group, scale: Scale) -> bool | None:
        """See `UpdateRule`."""
        return self._dense.encode(part, grad, signed(scale, group), SQUARABLE)

    def apply(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: Group) -> None:
        """See `UpdateRule`."""
        adam = self._adam
        adam.updates.now[position] += 1
        answers = self.context.session.channel.buffers.answers
        updates, kernels = adam.updates.now[position], self.context.kernels
        lamb_step(kernels, parts, x, low, adam.m, adam.v, answers, group, updates, self._coeffs)


def lamb_step(
    kernels: Kernels,
    parts: Sequence[Part],
    x: Tensor,
    low: Tensor | None,
    m: Tensor,
    v: Tensor,
    gradient: Tensor,
    group: Group,
    updates: int,
    coeffs: tuple[float, float],
) -> tuple[float, float]:
    """Take LAMB's step for one parameter, after `updates` updates, this one included.

    Returns:
        Its factor c, and the sum of its variance.
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
        sums = torch.zeros(part.down_runs.shape[0], 3, dtype=torch.float64, device=x.device)
        kernels.lamb_measure(part.down_runs, x, low, m, v, gradient, beta1=beta1, beta2=beta2, **direction, sums=sums)
        measured += sums.tolist()
    size, length = norms([row[:2] for row in measured])
    coefficient = clamp(size / length if size > 0 and length > 0 else 1.0, *coeffs)
    for part in parts:
        kernels.lamb_apply(part.down_runs, x, low, m, v, **direction, rate=float(group["lr"]) * coefficient)
    return coefficient, math.fsum(row[2] for row in measured)


def norms(squares: Sequence[Sequence[float]]) -> list[float]:
    """The norms of which rows of sums of squares are the parts."""
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

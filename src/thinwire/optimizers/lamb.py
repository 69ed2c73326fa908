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

from thinwire.kernels.ops import Kernels
from thinwire.optimizers._adam import AdamFamily, correction, root_correction
from thinwire.optimizers._options import Unpack, WireOptions
from thinwire.transport.buffers import Part


class Lamb(AdamFamily):
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
        self._coeffs = (min_coeff, max_coeff)
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, **wire)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "min_coeff": self._coeffs[0], "max_coeff": self._coeffs[1]}

    def _apply(
        self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: dict[str, Any]
    ) -> None:
        self._updates.now[position] += 1
        answers, updates = self._channel.buffers.answers, self._updates.now[position]
        lamb_step(self._kernels, parts, x, low, self._m, self._v, answers, group, updates, self._coeffs)


def lamb_step(
    kernels: Kernels,
    parts: Sequence[Part],
    x: Tensor,
    low: Tensor | None,
    m: Tensor,
    v: Tensor,
    gradient: Tensor,
    group: dict[str, Any],
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
    """The number between the two that is nearest to `value`."""
    return min(max(value, low), high)


def check_range(low_name: str, low: float, high_name: str, high: float) -> None:
    """Refuse limits that are none.

    Raises:
        ValueError: naming the arguments.
    """
    if not 0 < low <= high < math.inf:
        raise ValueError(f"{low_name}={low!r} and {high_name}={high!r}: expected 0 < {low_name} <= {high_name}")

"""1-bit LAMB: LAMB until its variance has settled, then momentum by signs with a scale that suits all layers.

Conglong Li, Ammar Ahmad Awan, Hanlin Tang, Samyam Rajbhandari, Yuxiong He: "1-bit LAMB: Communication Efficient
Large-Scale Large-Batch Training with LAMB's Convergence Speed". HiPC 2022.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.kernels.modes import Scale
from thinwire.optimizers._adam import correction, signed
from thinwire.optimizers._frozen import FrozenVariance
from thinwire.optimizers._options import Unpack, WireOptions
from thinwire.optimizers._state import State
from thinwire.optimizers._warmup import Length
from thinwire.optimizers.lamb import check_range, clamp, lamb_step, norms
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.layout import Layout
from thinwire.transport.memory import untouched_zeros

_COEFF_BETA = 0.9
_SILENT = 0.1
"""A layer with less momentum than this much of √v̂ has fallen silent: noise alone gives twice as much at β1 = 0.9."""
_MOST_WEIGHT = 1000.0


class OneBitLamb(FrozenVariance):
    r"""1-bit LAMB (Li et al., HiPC 2022): layer-wise steps for large batches, one bit a parameter after a warm-up.

    Warm-up is `thinwire.Lamb` on the exact mean gradient, and keeps an average c_avg of each layer's factor c. When it
    ends the variance is frozen as v̂, a second one w goes on from it, and each layer gets a weight k so that momenta of
    all layers are of one size. With the scaled sign C(y) = ‖y‖₂/√len · sign(y) and errors e_i, ē as in
    `thinwire.OneBitAdam`::

        m ← C( mean_i C(k (β1 m + (1-β1) g_i) + e_i) + ē ) / k        r = m̂ / (√v̂ + ε) + λ x
        g = (m - β1 m_before) / (1-β1)        w ← β2 w + (1-β2) g²    f = max((√v̂ + ε) / (√w + ε))
        x ← x - lr · c_avg · f · r

    With weight decay f is blended, f ← f p + (1-p) with p = min(1, ‖m̂/(√v̂ + ε)‖ / ‖r‖). It stays within
    [factor_min, factor_max], and within `factor_threshold` of its last value.

    Example::

        model = DDP(net)
        opt = thinwire.OneBitLamb(model.parameters(), lr=5e-3, betas=(0.9, 0.99), warmup_steps=1500)
        thinwire.attach(model, opt)
        ...
        loss.backward(); opt.step(); opt.zero_grad()

    Args:
        params: parameters or groups of them, as in torch.optim. Groups may have their own `lr`, `betas`, `eps`,
            `weight_decay` and `maximize`. A layer is a parameter tensor.
        lr: step size, relative to the size of a layer's weights.
        betas: decay of the momentum and of the variances.
        eps: added to √v̂ and √w.
        weight_decay: decay λ, as a part of the direction r.
        warmup_steps: how many steps are dense, or "auto", as in `thinwire.OneBitAdam`.
        total_steps: the length of the run, if you know it: you are warned if the warm-up is going to take all of it.
        variance_floor: √v̂ counts for at least this part of its root mean square, as in `thinwire.OneBitAdam`.
        min_coeff: the least factor c of a layer during warm-up.
        max_coeff: the largest.
        factor_min: the least factor f of a layer after the warm-up.
        factor_max: the largest.
        factor_threshold: by which part of its last value f may change in a step.
        maximize: ascend instead of descend.
        error_dtype: of the two error memories. torch.bfloat16 halves them.
        process_group: the ranks that train together; the default group if None.
        topology: "flat", "hierarchical" or "auto", as in `thinwire.Birder`.
        mesh: a two-dimensional DeviceMesh of the same ranks, a row a node, where LOCAL_WORLD_SIZE does not tell.
        node_dtype: of gradients on the link inside a node: torch.float32, or torch.bfloat16 for half the bytes.
        bucket_mb: size of an exchange, in megabytes of fp32 gradient; if None a quarter of the model, within 4 to 32.
            Scales belong to shards of buckets, so results depend on it.
        max_consecutive_skips: after so many steps in a row that were skipped for gradients that are not finite, step()
            raises TooManySkips; None for never.
        check_replicas_every: compare a hash of the parameters over all ranks after every so many steps; 0 for never.

    When not to use it:
        With ordinary batches: `thinwire.OneBitAdam` and `thinwire.Birder` are simpler, and LAMB's factors gain nothing.
        For short runs, whose warm-up is most of them.

    Gradient clipping:
        Under `attach` gradients are on their way before `clip_grad_norm_` sees them, so that it has no effect.

    Differences from the paper:
        * Bias correction as in Adam; c_avg begins at the first c instead of at zero.
        * The frozen variance and w are the corrected ones. w follows from the second step after the switch on, because
          the momentum before the first is no sum of signs.
        * A layer's weight k is at most 1000 times the mean's and at least a 1000th; a layer that has fallen silent
          before the switch is weighed by a tenth of √v̂. The floor of the frozen variance.
        * A layer without momentum at the switch has a weight of 1; factors of 1 where the weights or the direction are
          zero.
        * A coordinate that has never had a gradient (v = 0) neither moves nor decays, and does not count in f.
        * A scale a shard of a bucket, and what `thinwire.OneBitAdam` says of absent and of non-finite gradients.
        * A gradient of more than 2⁶⁰ counts as one that is not finite: its square would stay in the variance.
        * In a hierarchical topology of a single node nothing is compressed and the warm-up never ends: it is LAMB.
    """

    _remembers = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        warmup_steps: Length = "auto",
        total_steps: int | None = None,
        variance_floor: float = 0.1,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        factor_min: float = 0.5,
        factor_max: float = 4.0,
        factor_threshold: float = 0.1,
        maximize: bool = False,
        error_dtype: torch.dtype = torch.float32,
        **wire: Unpack[WireOptions],
    ) -> None:
        check_range("min_coeff", min_coeff, "max_coeff", max_coeff)
        check_range("factor_min", factor_min, "factor_max", factor_max)
        if not factor_min <= 1 <= factor_max:
            raise ValueError(f"factor_min={factor_min!r} and factor_max={factor_max!r}: expected 1 between them")
        if not 0 <= factor_threshold < 1:
            raise ValueError(f"factor_threshold={factor_threshold!r}: expected a number in [0, 1)")
        self._coeffs = (min_coeff, max_coeff)
        self._factors = (factor_min, factor_max)
        self._factor_threshold = factor_threshold
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            variance_floor=variance_floor,
            maximize=maximize,
            error_dtype=error_dtype,
            **wire,
        )

    def _settings(self) -> dict[str, Any]:
        names = ("min_coeff", "max_coeff", "factor_min", "factor_max", "factor_threshold")
        limits = (*self._coeffs, *self._factors, self._factor_threshold)
        return {**super()._settings(), **dict(zip(names, limits, strict=True))}

    def _declare(self, layout: Layout) -> tuple[dict[str, Compressor], State]:
        compressors, state = super()._declare(layout)
        self._coefficient = self._layer_numbers("coefficient", state, layout, torch.float64)
        """c_avg of each layer, up to the switch without bias correction."""
        self._factor = self._layer_numbers("factor", state, layout, torch.float64, start=1)
        self._layer_weight = self._layer_numbers("weight", state, layout, torch.float64, start=1, check=_check_weight)
        self._follows = False
        """Whether w follows the gradients in this step: it takes two answers to tell one."""
        if self._topology.compresses:
            self._w = untouched_zeros(layout.size, torch.float32, layout.device)
            state.whole["w"] = self._w
        return compressors, state

    def _settle(self, flags: int) -> int:
        flags = super()._settle(flags)
        if self._compressing:
            self._follows = self._signs.has_before
        return flags

    def _local(
        self, position: int, part: Part, grad: Tensor | None, group: dict[str, Any], scale: Scale
    ) -> bool | None:
        if not self._compressing:
            return super()._local(position, part, grad, group, scale)
        beta = group["betas"][0]
        scale = signed(scale, group) * self._weight(position)
        return self._signs.encode(part, grad, beta=beta, weight=1.0 - beta, scale=scale)

    def _apply(
        self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: dict[str, Any]
    ) -> None:
        self._updates.now[position] += 1
        updates = self._updates.now[position]
        if self._compressing:
            self._apply_compressed(position, parts, x, low, group, updates)
            return
        answers = self._channel.buffers.answers
        c, variance = lamb_step(self._kernels, parts, x, low, self._m, self._v, answers, group, updates, self._coeffs)
        self._variances.now[position] = variance
        average = self._coefficient.now[position]
        self._coefficient.now[position] = _COEFF_BETA * average + (1 - _COEFF_BETA) * c

    def _apply_compressed(
        self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: dict[str, Any], updates: int
    ) -> None:
        (beta1, beta2), weight_decay = group["betas"], group["weight_decay"]
        shrink, unbias = 1.0 / self._weight(position), correction(beta1, updates)
        measured: list[list[float]] = []
        for part in parts:
            sums = torch.zeros(part.down_runs.shape[0], 3, dtype=torch.float64, device=x.device)
            self._kernels.onebit_lamb_measure(
                part.down_runs,
                x,
                low,
                self._v,
                self._w,
                self._signs.answer,
                self._signs.answer_scales,
                self._signs.answer_before,
                self._signs.answer_scales_before,
                shrink=shrink,
                beta1=beta1,
                beta2=beta2 if self._follows else 1.0,
                eps=group["eps"],
                unbias=unbias,
                weight_decay=weight_decay,
                sums=sums,
            )
            measured += sums.tolist()
        adaptive, length = norms([row[:2] for row in measured])
        factor = self._next_factor(position, max(row[2] for row in measured), adaptive, length, weight_decay)
        rate = float(group["lr"]) * self._coefficient.now[position] * factor
        for part in parts:
            self._apply_signs(part, x, low, rate=rate * unbias * shrink, decay=1.0 - rate * weight_decay)

    def _next_factor(self, position: int, factor: float, adaptive: float, length: float, weight_decay: float) -> float:
        """The factor f of a layer, given the largest ratio of its variances and the norms of m̂/(√v̂ + ε) and r."""
        if weight_decay > 0:
            share = min(1.0, adaptive / length) if length > 0 else 1.0
            factor = factor * share + (1.0 - share)
        factor = clamp(factor, *self._factors)
        last = self._factor.now[position]
        factor = clamp(factor, last * (1.0 - self._factor_threshold), last * (1.0 + self._factor_threshold))
        self._factor.now[position] = factor
        return factor

    def _switch(self) -> None:
        sizes = [self._typical_momentum(position) for position in range(len(self._layout.slots))]
        some = [size for size in sizes if size > 0]
        for position, (slot, size) in enumerate(zip(self._layout.slots, sizes, strict=True)):
            updates = self._updates.now[position]
            if size > 0:
                weight = math.fsum(some) / len(some) / size
                self._layer_weight.now[position] = clamp(weight, 1 / _MOST_WEIGHT, _MOST_WEIGHT)
            self._coefficient.now[position] *= correction(_COEFF_BETA, updates)
            here = slice(slot.start, slot.start + slot.numel)
            torch.mul(self._v[here], correction(self._group_of(position)["betas"][1], updates), out=self._w[here])
        super()._switch()

    def _typical_momentum(self, position: int) -> float:
        """The root mean square of a layer's momentum, or a tenth of √v̂'s if that is more.

        A layer whose gradients have been silent for a while has next to no momentum. Weighted by it, they would drown
        all others in the shard when they return; √v̂ remembers them longer.
        """
        slot = self._layout.slots[position]
        if not slot.numel:
            return 0.0
        beta2 = self._group_of(position)["betas"][1]
        momentum = self._kernels.square_sum(self._m[slot.start : slot.start + slot.numel])
        variance = self._variances.now[position] * correction(beta2, self._updates.now[position])
        return math.sqrt(max(momentum, _SILENT**2 * variance) / slot.numel)

    def _weight(self, position: int) -> float:
        return self._layer_weight.now[position]


def _check_weight(weight: Tensor, step: int) -> str | None:
    fine = 1 / _MOST_WEIGHT <= float(weight) <= _MOST_WEIGHT
    return None if fine else f"is not between {1 / _MOST_WEIGHT} and {_MOST_WEIGHT}"

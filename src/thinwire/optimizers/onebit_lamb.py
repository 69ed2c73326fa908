"""1-bit LAMB: LAMB until its variance has settled, then momentum by signs with a scale that suits all layers.

Conglong Li, Ammar Ahmad Awan, Hanlin Tang, Samyam Rajbhandari, Yuxiong He: "1-bit LAMB: Communication Efficient
Large-Scale Large-Batch Training with LAMB's Convergence Speed". HiPC 2022.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.kernels.modes import Scale
from thinwire.optimizers.adam import AdamMoments, adam_defaults, check_adam_group, correction, signed
from thinwire.optimizers.lamb import check_range, clamp, lamb_step, norms
from thinwire.optimizers.optimizer import Unpack, WireOptimizer, WireOptions
from thinwire.optimizers.rule import Context, Group, UpdateRule
from thinwire.optimizers.warmup import (
    DenseThenSigns,
    Length,
    StageOptions,
    check_length,
    largest_beta2,
    warn_of_dense_run,
)
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.memory import untouched_zeros
from thinwire.transport.state import State, Tensors

_COEFF_BETA = 0.9
_SILENT = 0.1
"""A layer with less momentum than this fraction of √v̂ has no gradients now: noise alone gives twice as much at
β1 = 0.9."""
_MOST_WEIGHT = 1000.0


class OneBitLamb(WireOptimizer):
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
        limits = LayerLimits(min_coeff, max_coeff, factor_min, factor_max, factor_threshold)
        rule = OneBitLambRule(StageOptions(warmup_steps, variance_floor, error_dtype), limits)
        super().__init__(params, adam_defaults(lr, betas, eps, weight_decay, maximize=maximize), rule, **wire)
        warn_of_dense_run(warmup_steps, total_steps, largest_beta2(self.param_groups))


@dataclass(frozen=True)
class LayerLimits:
    """The limits of the factors c and f of a layer, as in `OneBitLamb`.

    Raises:
        ValueError: naming the argument.
    """

    min_coeff: float
    max_coeff: float
    factor_min: float
    factor_max: float
    factor_threshold: float

    def __post_init__(self) -> None:
        check_range("min_coeff", self.min_coeff, "max_coeff", self.max_coeff)
        check_range("factor_min", self.factor_min, "factor_max", self.factor_max)
        if not self.factor_min <= 1 <= self.factor_max:
            raise ValueError(
                f"factor_min={self.factor_min!r} and factor_max={self.factor_max!r}: expected 1 between them"
            )
        if not 0 <= self.factor_threshold < 1:
            raise ValueError(f"factor_threshold={self.factor_threshold!r}: expected a number in [0, 1)")


class OneBitLambRule(UpdateRule):
    """The update rule of `OneBitLamb`.

    Args:
        options: when and how the second stage follows the first.
        limits: of the factors of a layer.
    """

    state_depends_on_buckets = True
    records_buckets = True

    def __init__(self, options: StageOptions, limits: LayerLimits) -> None:
        self._options = options
        self._limits = limits

    def check_group(self, group: Group) -> None:
        """See `UpdateRule`."""
        check_adam_group(group)
        check_length(self._options.warmup_steps, group["betas"][1])

    def settings(self) -> dict[str, Any]:
        """See `UpdateRule`."""
        return {**self._options.settings(), **vars(self._limits)}

    def bind(self, context: Context) -> tuple[dict[str, Compressor], State]:
        """See `UpdateRule`."""
        self.context = context
        state, layout = State(), context.layout
        self._adam = AdamMoments(context, state)
        self._stages = DenseThenSigns(context, state, self._adam, self._options, keep_previous_answer=True)
        layers = len(layout.slots)
        self._coefficient = state.add_numbers("coefficient", layers, torch.float64)
        """c_avg of each layer, up to the switch without bias correction."""
        self._factor = state.add_numbers("factor", layers, torch.float64, start=1)
        self._weight = state.add_numbers("weight", layers, torch.float64, start=1, check=_check_weight)
        """What a layer's momentum is multiplied by in packets."""
        self._updates_w = False
        """Whether w is updated in this step: the gradient follows from two answers."""
        if context.topology.compresses:
            self._w = untouched_zeros(layout.size, torch.float32, layout.device)
            state.whole["w"] = self._w
        return self._stages.compressors, state

    def shared_state(self) -> Tensors:
        """See `UpdateRule`."""
        return {"v": self._adam.v}

    def progress(self) -> dict[str, Any]:
        """See `UpdateRule`."""
        return self._stages.progress()

    def channel(self) -> str:
        """See `UpdateRule`."""
        return self._stages.channel()

    def begin_step(self) -> None:
        """See `UpdateRule`."""
        self._stages.begin_step()

    def encode(self, position: int, part: Part, grad: Tensor | None, group: Group, scale: Scale) -> bool | None:
        """See `UpdateRule`."""
        scale = signed(scale, group)
        if self._stages.compressing:
            scale = scale * self._weight.now[position]
        return self._stages.encode(part, grad, group, scale)

    def settle(self, flags: int) -> int:
        """See `UpdateRule`."""
        self._stages.settle()
        if self._stages.compressing:
            self._updates_w = self._stages.signs.has_previous
        return flags

    def apply(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: Group) -> None:
        """See `UpdateRule`."""
        adam = self._adam
        adam.updates.now[position] += 1
        updates = adam.updates.now[position]
        if self._stages.compressing:
            self._apply_compressed(position, parts, x, low, group, updates)
            return
        answers, kernels = self.context.session.channel.buffers.answers, self.context.kernels
        limits = (self._limits.min_coeff, self._limits.max_coeff)
        c, variance = lamb_step(kernels, parts, x, low, adam.m, adam.v, answers, group, updates, limits)
        adam.variances.now[position] = variance
        average = self._coefficient.now[position]
        self._coefficient.now[position] = _COEFF_BETA * average + (1 - _COEFF_BETA) * c

    def _apply_compressed(
        self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: Group, updates: int
    ) -> None:
        (beta1, beta2), weight_decay, signs = group["betas"], group["weight_decay"], self._stages.signs
        shrink, unbias = 1.0 / self._weight.now[position], correction(beta1, updates)
        measured: list[list[float]] = []
        for part in parts:
            sums = torch.zeros(part.down_runs.shape[0], 3, dtype=torch.float64, device=x.device)
            self.context.kernels.onebit_lamb_measure(
                part.down_runs,
                x,
                low,
                self._adam.v,
                self._w,
                signs.answer,
                signs.answer_scales,
                signs.previous_answer,
                signs.previous_answer_scales,
                shrink=shrink,
                beta1=beta1,
                beta2=beta2 if self._updates_w else 1.0,
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
            self._stages.apply_signs(part, x, low, rate=rate * unbias * shrink, decay=1.0 - rate * weight_decay)

    def _next_factor(self, position: int, factor: float, adaptive: float, length: float, weight_decay: float) -> float:
        """The factor f of a layer, given the largest ratio of its variances and the norms of m̂/(√v̂ + ε) and r."""
        if weight_decay > 0:
            share = min(1.0, adaptive / length) if length > 0 else 1.0
            factor = factor * share + (1.0 - share)
        factor = clamp(factor, self._limits.factor_min, self._limits.factor_max)
        last, threshold = self._factor.now[position], self._limits.factor_threshold
        factor = clamp(factor, last * (1.0 - threshold), last * (1.0 + threshold))
        self._factor.now[position] = factor
        return factor

    def end_step(self) -> None:
        """See `UpdateRule`."""
        self._stages.end_step(self._weigh_layers)

    def _weigh_layers(self) -> list[float]:
        """At the switch: the weight of each layer, the corrected c_avg, and the start of w."""
        slots = self.context.layout.slots
        sizes = [self._typical_momentum(position) for position in range(len(slots))]
        some = [size for size in sizes if size > 0]
        for position, (slot, size) in enumerate(zip(slots, sizes, strict=True)):
            updates = self._adam.updates.now[position]
            if size > 0:
                weight = math.fsum(some) / len(some) / size
                self._weight.now[position] = clamp(weight, 1 / _MOST_WEIGHT, _MOST_WEIGHT)
            self._coefficient.now[position] *= correction(_COEFF_BETA, updates)
            here = slice(slot.start, slot.start + slot.numel)
            unbias = correction(self.context.group_of(position)["betas"][1], updates)
            torch.mul(self._adam.v[here], unbias, out=self._w[here])
        return list(self._weight.now)

    def _typical_momentum(self, position: int) -> float:
        """The root mean square of a layer's momentum, or a tenth of √v̂'s if that is more.

        A layer that has had no gradients for a while has next to no momentum. Weighted by it, its gradients would
        dominate the shard when they return. √v̂ decays more slowly.
        """
        slot = self.context.layout.slots[position]
        if not slot.numel:
            return 0.0
        beta2 = self.context.group_of(position)["betas"][1]
        momentum = self.context.kernels.square_sum(self._adam.m[slot.start : slot.start + slot.numel])
        variance = self._adam.variances.now[position] * correction(beta2, self._adam.updates.now[position])
        return math.sqrt(max(momentum, _SILENT**2 * variance) / slot.numel)

    def before_save(self, saved: dict[str, Any]) -> None:
        """See `UpdateRule`."""
        self._stages.before_save(saved)

    def portable(self, state: State, *, private: bool) -> State:
        """See `UpdateRule`."""
        return self._stages.portable(state, self.encode, private=private)

    @property
    def needs_compression(self) -> bool:
        """See `UpdateRule`."""
        return self._stages.compressing


def _check_weight(weight: Tensor, step: int) -> str | None:
    fine = 1 / _MOST_WEIGHT <= float(weight) <= _MOST_WEIGHT
    return None if fine else f"is not between {1 / _MOST_WEIGHT} and {_MOST_WEIGHT}"

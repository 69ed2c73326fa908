"""1-bit LAMB: dense LAMB until its variance has settled, then a momentum in signs, with weights that equalize layers.

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
    warn_of_long_warmup,
)
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.memory import untouched_zeros
from thinwire.transport.state import State, Tensors

_COEFF_BETA = 0.9
_SMALLEST_MOMENTUM = 0.1
"""A layer whose momentum is less than this fraction of √v̂ has no gradients now: with β1 = 0.9, noise alone gives twice
as much."""
_LARGEST_WEIGHT = 1000.0
"""The weight of a layer is at most this, and at least its inverse."""


class OneBitLamb(WireOptimizer):
    r"""1-bit LAMB (Li et al., HiPC 2022): layer-wise steps for large batches, one bit per parameter after a warm-up.

    The warm-up is `thinwire.Lamb` on the exact mean gradient. It also keeps an average c_avg of each layer's factor c.
    At its end the variance is frozen as v̂, a second variance w continues from it, and each layer gets a weight k that
    brings the momenta of all layers to the same size. With the scaled sign C(y) = ‖y‖₂/√len · sign(y) and residuals
    e_i and ē as in `thinwire.OneBitAdam`::

        m ← C( mean_i C(k (β1 m + (1-β1) g_i) + e_i) + ē ) / k        r = m̂ / (√v̂ + ε) + λ x
        g = (m - β1 m_before) / (1-β1)        w ← β2 w + (1-β2) g²    f = max((√v̂ + ε) / (√w + ε))
        x ← x - lr · c_avg · f · r

    With weight decay, f is blended: f ← f p + (1-p) with p = min(1, ‖m̂/(√v̂ + ε)‖ / ‖r‖). f stays within
    [factor_min, factor_max], and changes by at most the fraction `factor_threshold` per step.

    Example::

        model = DDP(net)
        opt = thinwire.OneBitLamb(model.parameters(), lr=5e-3, betas=(0.9, 0.99), warmup_steps=1500)
        thinwire.attach(model, opt)
        ...
        loss.backward(); opt.step(); opt.zero_grad()

    Args:
        params: parameters or parameter groups, as in torch.optim. Groups may have their own `lr`, `betas`, `eps`,
            `weight_decay` and `maximize`. A layer is one parameter tensor.
        lr: step size, relative to the norm of a layer's weights.
        betas: decay of the momentum and of the variances.
        eps: added to √v̂ and √w.
        weight_decay: decay λ, as a part of the direction r.
        warmup_steps: the number of steps of the warm-up, or "auto", as in `thinwire.OneBitAdam`.
        warmup_bits: the bits per parameter and direction in the warm-up: None for 32, or 4 or 8 and a scale per block
            of 64 parameters, as in `thinwire.OneBitAdam`.
        total_steps: the length of the run, if known. The constructor warns if the warm-up would take all of it.
        variance_floor: √v̂ is at least this fraction of its root mean square, as in `thinwire.OneBitAdam`.
        min_coeff: the smallest factor c of a layer in the warm-up.
        max_coeff: the largest factor c of a layer in the warm-up.
        factor_min: the smallest factor f of a layer after the warm-up.
        factor_max: the largest factor f of a layer after the warm-up.
        factor_threshold: the largest relative change of f in one step.
        maximize: ascend instead of descend.
        scale_block: the number of parameters that share a scale after the warm-up, as in `thinwire.OneBitAdam`.
        error_dtype: the dtype of all residuals. torch.bfloat16 halves their memory.
        process_group: the ranks that train together; the default group if None.
        topology: "flat", "hierarchical" or "auto", as in `thinwire.Birder`.
        mesh: a two-dimensional DeviceMesh of the same ranks, one row per node, if LOCAL_WORLD_SIZE is not set.
        node_dtype: the dtype of gradients on the link inside a node: torch.float32, or torch.bfloat16 for half the
            bytes.
        bucket_mb: the size of a bucket, in megabytes of fp32 gradient. None: a quarter of the model, but at least 4 and
            at most 32.
            Scales belong to shards of buckets, so results depend on it.
        max_consecutive_skips: `step()` raises TooManySkips after this many skipped steps in a row. All ranks skip a
            step if a gradient on any rank is not finite. None: never.
        check_replicas_every: compare a hash of the parameters across all ranks every this many steps; 0 for never.
        clip_norm: clip this rank's own gradient to this norm, as in `thinwire.Birder`. None: no limit.
        clip_value: clip each element of this rank's own gradient to [-clip_value, clip_value]. None: no limit.
        delay: 1 to apply the answer of each step in the next one, as in `thinwire.Birder`, after the warm-up: step t
            applies m of step t-1, and w and f follow from it and m of step t-2. λx and p are computed from x of step t;
            c_avg is that of the warm-up, which has no delay. Workers still encode with the momentum of the step before,
            so messages are as without a delay. Costs no memory.

    When not to use it:
        With ordinary batch sizes: `thinwire.OneBitAdam` and `thinwire.Birder` are simpler, and LAMB's factors gain
        nothing. For short runs, most of which would be warm-up.

    Gradient clipping:
        Use `clip_norm` or `clip_value`. A spike stays in the momentum and the residuals for many steps. Under `attach`,
        `clip_grad_norm_` would come after gradients were sent, and `step()` raises GradientChanged. Without `attach` it
        works too, and clips this rank's own gradient.

    Differences from the paper:
        * Bias correction as in Adam. c_avg starts at the first c instead of at zero.
        * The frozen variance and w start from the bias-corrected variance. w changes from the second step after the
          switch on, because the momentum before the first one was not received as signs.
        * A layer's weight k is the mean momentum of all layers divided by its own, within [1/1000, 1000]. For a layer
          that had no gradients for a while before the switch, a tenth of √v̂ takes the place of its momentum.
        * The variance floor.
        * A layer without momentum at the switch has the weight 1. A factor is 1 if the weights or the direction are
          all zero.
        * A coordinate that never had a gradient (v = 0) neither moves nor decays, and does not count in f.
        * One scale per shard of a bucket, or per block of `scale_block` parameters. Absent and non-finite gradients are
          treated as in `thinwire.OneBitAdam`.
        * A gradient above 2⁶⁰ counts as not finite, because its square would stay in the variance.
        * In a hierarchical topology with a single node, nothing is compressed and the warm-up never ends: it is LAMB.
        * The quantised warm-up of `thinwire.OneBitAdam`, whose residuals are dropped when it ends.
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
        warmup_steps: Length = "auto",
        warmup_bits: int | None = None,
        total_steps: int | None = None,
        variance_floor: float = 0.1,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        factor_min: float = 0.5,
        factor_max: float = 4.0,
        factor_threshold: float = 0.1,
        maximize: bool = False,
        scale_block: int | None = None,
        error_dtype: torch.dtype = torch.float32,
        **wire: Unpack[WireOptions],
    ) -> None:
        limits = LayerLimits(min_coeff, max_coeff, factor_min, factor_max, factor_threshold)
        options = StageOptions(warmup_steps, variance_floor, error_dtype, warmup_bits, scale_block)
        defaults = adam_defaults(lr, betas, eps, weight_decay, maximize=maximize)
        super().__init__(params, defaults, OneBitLambRule(options, limits), **wire)
        warn_of_long_warmup(options, total_steps, largest_beta2(self.param_groups))


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
        options: when and how the compressed stage follows the warm-up.
        limits: the limits of the factors of a layer.
    """

    state_depends_on_buckets = True
    records_buckets = True
    no_delay = None
    needs_whole = "the norms of whole layers"

    def __init__(self, options: StageOptions, limits: LayerLimits) -> None:
        self._options = options
        self.scale_block = options.scale_block
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
        """c_avg of each layer; not bias-corrected before the switch."""
        self._factor = state.add_numbers("factor", layers, torch.float64, start=1)
        self._weight = state.add_numbers("weight", layers, torch.float64, start=1, check=_check_weight)
        """k of each layer: the factor of its momentum in packets."""
        self._updates_w = False
        """Whether this step updates w, which needs two consecutive answers to recover the gradient."""
        if context.topology.compresses:
            self._w = untouched_zeros(layout.size, torch.float32, layout.device)
            state.whole["w"] = self._w
        return self._stages.compressors, state

    def compared_state(self) -> Tensors:
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
        if self.context.delayed and self.context.topology.compresses:
            self._updates_w = self._stages.signs.has_previous  # of a loaded state, whose answer was not applied yet

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

    @property
    def delays(self) -> bool:
        """See `UpdateRule`. The last two answers are kept in any case."""
        return self._stages.compressing

    def apply(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: Group) -> None:
        """See `UpdateRule`."""
        adam = self._adam
        adam.updates.now[position] += 1
        updates = adam.updates.now[position]
        if self._stages.compressing:
            self._apply_compressed(position, parts, x, low, group, updates)
            return
        gradient, kernels = self._stages.mean.floats, self.context.kernels
        limits = (self._limits.min_coeff, self._limits.max_coeff)
        c, variance = lamb_step(kernels, parts, x, low, adam.m, adam.v, gradient, group, updates, limits)
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
        """At the switch, compute the weight of each layer, correct the bias of c_avg, and start w from the variance."""
        slots = self.context.layout.slots
        sizes = [self._typical_momentum(position) for position in range(len(slots))]
        nonzero = [size for size in sizes if size > 0]
        for position, (slot, size) in enumerate(zip(slots, sizes, strict=True)):
            updates = self._adam.updates.now[position]
            if size > 0:
                weight = math.fsum(nonzero) / len(nonzero) / size
                self._weight.now[position] = clamp(weight, 1 / _LARGEST_WEIGHT, _LARGEST_WEIGHT)
            self._coefficient.now[position] *= correction(_COEFF_BETA, updates)
            here = slice(slot.start, slot.start + slot.numel)
            unbias = correction(self.context.group_of(position)["betas"][1], updates)
            torch.mul(self._adam.v[here], unbias, out=self._w[here])
        return list(self._weight.now)

    def _typical_momentum(self, position: int) -> float:
        """The root mean square of a layer's momentum, or a tenth of that of √v̂ if that is larger.

        A layer that has had no gradients for a while has almost no momentum, and would get a huge weight: its gradients
        would dominate the shard when they return. √v̂ decays more slowly.
        """
        slot = self.context.layout.slots[position]
        if not slot.numel:
            return 0.0
        beta2 = self.context.group_of(position)["betas"][1]
        momentum = self.context.kernels.square_sum(self._adam.m[slot.start : slot.start + slot.numel])
        variance = self._adam.variances.now[position] * correction(beta2, self._adam.updates.now[position])
        return math.sqrt(max(momentum, _SMALLEST_MOMENTUM**2 * variance) / slot.numel)

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
    in_range = 1 / _LARGEST_WEIGHT <= float(weight) <= _LARGEST_WEIGHT
    return None if in_range else f"is not between {1 / _LARGEST_WEIGHT} and {_LARGEST_WEIGHT}"

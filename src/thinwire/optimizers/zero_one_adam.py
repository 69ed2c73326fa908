"""0/1 Adam: less and less frequent updates of the variance, 1-bit gradients between them, and then local steps.

Yucheng Lu, Conglong Li, Minjia Zhang, Christopher De Sa, Yuxiong He: "Maximizing Communication Efficiency for
Large-scale Training via 0/1 Adam". ICLR 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire._checks import INT64_MAX, is_integer
from thinwire.compressors.local import LocalMomentum, NodeMomentum
from thinwire.compressors.scaled_sign import ScaledSign
from thinwire.kernels.modes import Output, Scale
from thinwire.optimizers.adam import (
    DENSE,
    SIGNS,
    AdamMoments,
    adam_defaults,
    check_adam_group,
    check_error_dtype,
    check_floor,
    check_scale_block,
    correction,
    signed,
)
from thinwire.optimizers.local_steps import Interval, local_interval, variance_steps
from thinwire.optimizers.mean_gradient import MeanGradient, check_warmup_bits
from thinwire.optimizers.optimizer import Unpack, WireOptimizer, WireOptions
from thinwire.optimizers.rule import Context, Group, RuleEncoder, UpdateRule
from thinwire.transport import packet
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.memory import untouched_zeros
from thinwire.transport.session import LOCAL
from thinwire.transport.state import State, Tensors, steps_then_numbers

_PRESENT, _ANCHORED = 1, 2
"""Bits of a parameter, since replicas were equal: it has had a gradient; it has moved, and its anchor is kept."""
_SMALLEST = 1e-30
"""A smaller sum of learning rates counts as zero, because its inverse would overflow float32."""
_FALL = 0.99
"""If learning rates fall below this fraction of those before, residuals shrink with them."""


class ZeroOneAdam(WireOptimizer):
    r"""0/1 Adam (Lu et al., ICLR 2023): between zero and one bit per parameter and step.

    There are two kinds of steps up to `var_freeze_step`. Variance steps, at growing distances, are AdamW's on the exact
    mean gradient. In all other steps, workers send gradients as scaled signs C(y) = ‖y‖₂/√len · sign(y) with error
    feedback, which update only the momentum::

        m ← β1 m + (1-β1) C( mean_i C(g_i + e_i) + ē )        x ← (1 - lr·λ) x - lr · m̂ / (√v̂ + ε)

    After `var_freeze_step`, every worker takes local steps with its own momentum and accumulates them in u_i. The
    workers synchronize at growing intervals: they exchange u_i in scaled signs, return to the last values that they
    shared, and take the same step from there::

        m_i ← β1 m_i + (1-β1) g_i      u_i ← u_i + α m_i      x_i ← (1 - lr·λ) x_i - α m_i / (√v̂ + ε)
        u ← C( mean_i C(u_i + e_i) + ē )      m_i ← u / Σα      x_i ← Π(1 - lr·λ) x_then - u / (√v̂ + ε)

    Replicas differ between synchronizations, by design, and are equal to the bit after each. Call `synchronize()`
    before you evaluate or save a model. Call it also before you change weights, because the next synchronization would
    undo the change. `is_synchronized` is True while replicas are equal.

    Example::

        model = DDP(net)
        opt = thinwire.ZeroOneAdam(model.parameters(), lr=1e-3, var_freeze_step=1000, local_step_scaler=1000)
        thinwire.attach(model, opt)
        ...
        loss.backward(); opt.step(); opt.zero_grad()
        ...
        opt.synchronize()          # on all ranks, before evaluating or saving

    Args:
        params: parameters or parameter groups, as in torch.optim. Groups may have their own `lr`, `betas`, `eps`,
            `weight_decay` and `maximize`.
        lr: step size, the same as AdamW's.
        betas: decay of the momentum and of the variance. The latter applies once per variance step.
        eps: added to √v̂, as in AdamW.
        weight_decay: decoupled decay λ, as in AdamW. It never enters the momentum.
        var_freeze_step: the last step that may update the variance, and the last step before local steps.
        var_update_scaler: this many consecutive variance steps come first, then as many two steps apart, then four
            steps apart, and so on.
        warmup_bits: the bits per parameter and direction in variance steps: None for 32, or 4 or 8 and a scale per
            block of 64 parameters, as in `thinwire.OneBitAdam`. Their residuals wait for the next variance step.
        variance_floor: where signs are divided by √v̂, it is at least this fraction of its root mean square over the
            parameter, as in `thinwire.OneBitAdam`.
        local_step_scaler: the interval between synchronizations doubles every this many steps after `var_freeze_step`.
        local_step_clipper: the longest interval between synchronizations.
        maximize: ascend instead of descend.
        scale_block: the number of parameters that share a scale of signs, as in `thinwire.OneBitAdam`.
        error_dtype: the dtype of all residuals; the worker's also holds u_i. torch.bfloat16 halves their memory. Use
            it only with a small `local_step_clipper`: steps below 1/512 of u_i would be lost.
        process_group: the ranks that train together; the default group if None.
        topology: "flat", "hierarchical" or "auto", as in `thinwire.Birder`. In a hierarchical topology the node is the
            worker: its ranks average over their link at every step, and differ only from other nodes.
        mesh: a two-dimensional DeviceMesh of the same ranks, one row per node, if LOCAL_WORLD_SIZE is not set.
        node_dtype: the dtype of gradients on the link inside a node: torch.float32, or torch.bfloat16 for half the
            bytes.
        bucket_mb: the size of a bucket, in megabytes of fp32 gradient. None: a quarter of the model, but at least 4 and
            at most 32.
            Scales belong to shards of buckets, so results depend on it.
        max_consecutive_skips: `step()` raises TooManySkips after this many steps in a row that all ranks skipped
            because a gradient on some rank was not finite. None: never.
        check_replicas_every: compare a hash of the parameters across all ranks every this many steps; 0 for never.
        clip_norm: clip this rank's own gradient to this norm, as in `thinwire.Birder`. None: no limit.
        clip_value: clip each element of this rank's own gradient to [-clip_value, clip_value]. None: no limit.
        delay: 0. `delay=1` of other optimizers is refused here, with the reason.

    When not to use it:
        When replicas must be equal at every step: batch-norm statistics, and evaluation or sampling in the training
        loop, see one worker's weights. When workers have different kinds of data, local steps diverge: keep
        `local_step_clipper` small; 1 means no local steps. For short runs, most of which would be variance steps, use
        `thinwire.Birder`.

    Gradient clipping:
        Use `clip_norm` or `clip_value`. The frozen variance does not grow with a spike, which then moves parameters
        far. Under `attach`, `clip_grad_norm_` would come after gradients were sent, and `step()` raises
        GradientChanged. Without `attach` it works too, and clips this rank's own gradient.

    Differences from the paper:
        * Bias correction as in Adam: of the variance by the number of its updates until the freeze, of the momentum
          throughout. Decoupled weight decay.
        * Local steps are not subtracted again, which would leave rounding errors. Replicas return to a copy of the last
          values that they shared, and the decay since then is applied to the copy.
        * The sum of steps is kept before the division by √v̂ + ε, in the same buffer as the residual.
        * If learning rates fall by more than 1 % from one interval to the next, residuals shrink with them. Residuals
          are multiples of the earlier learning rates, and u / Σα would turn them into a large momentum.
        * One scale per shard of a bucket, or per block of `scale_block` parameters, and the variance floor. A
          coordinate without a gradient up to the freeze (v = 0) does not move.
        * Gradients that are not finite: before the freeze, all workers skip the step. After it, a worker skips its
          local step alone. All workers skip a synchronizing step if no local steps came before it; otherwise they take
          it without the non-finite elements.
        * A gradient above 2⁶⁰ counts as not finite, because its square would stay in the variance.
        * In a hierarchical topology with a single node, nothing is compressed, and every step is AdamW's.
        * The quantised gradients of variance steps, whose residuals are dropped at `var_freeze_step`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        var_freeze_step: int = 1000,
        var_update_scaler: int = 16,
        warmup_bits: int | None = None,
        variance_floor: float = 0.1,
        local_step_scaler: int = 1000,
        local_step_clipper: int = 16,
        maximize: bool = False,
        scale_block: int | None = None,
        error_dtype: torch.dtype = torch.float32,
        **wire: Unpack[WireOptions],
    ) -> None:
        schedule = {
            "var_freeze_step": var_freeze_step,
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
        }
        rule = ZeroOneAdamRule(schedule, warmup_bits, variance_floor, error_dtype, scale_block)
        super().__init__(params, adam_defaults(lr, betas, eps, weight_decay, maximize=maximize), rule, **wire)


class ZeroOneAdamRule(UpdateRule):
    """The update rule of `ZeroOneAdam`.

    Args:
        schedule: the numbers of steps among the arguments of `ZeroOneAdam`, by name.
        warmup_bits, variance_floor, error_dtype, scale_block: as in `ZeroOneAdam`.

    Raises:
        ValueError: naming the argument.
    """

    state_depends_on_buckets = True
    records_buckets = True
    has_local_steps = True
    no_delay = (
        "ranks that have taken local steps become equal by applying an answer in the step that exchanges it. One step "
        "later each would have taken another step of its own, so ranks would never be equal, and no model could be "
        "evaluated or saved without one more exchange. Local steps already hide the network: see local_step_clipper"
    )

    def __init__(
        self,
        schedule: dict[str, int],
        warmup_bits: int | None,
        variance_floor: float,
        error_dtype: torch.dtype,
        scale_block: int | None,
    ) -> None:
        for name, value in schedule.items():
            if not is_integer(value, 1, INT64_MAX):
                raise ValueError(f"{name}={value!r}: expected a positive number of steps")
        self._freeze_step, scaler = schedule["var_freeze_step"], schedule["var_update_scaler"]
        if self._freeze_step < scaler:
            raise ValueError(
                f"var_freeze_step={self._freeze_step}: the variance would be frozen before its first "
                f"var_update_scaler={scaler} updates. Expected at least {scaler}"
            )
        check_error_dtype(error_dtype)
        check_floor(variance_floor)
        check_warmup_bits(warmup_bits)
        check_scale_block(scale_block)
        self._schedule = schedule
        self._warmup_bits = warmup_bits
        self._variance_floor = variance_floor
        self._error_dtype = error_dtype
        self.scale_block = scale_block
        self._variance_steps = variance_steps(scaler, self._freeze_step)

    def check_group(self, group: Group) -> None:
        """See `UpdateRule`."""
        check_adam_group(group)

    def settings(self) -> dict[str, Any]:
        """See `UpdateRule`."""
        return {
            **self._schedule,
            "warmup_bits": self._warmup_bits,
            "variance_floor": self._variance_floor,
            "error_dtype": str(self._error_dtype),
            **({} if self.scale_block is None else {"scale_block": self.scale_block}),
        }

    def bind(self, context: Context) -> tuple[dict[str, Compressor], State]:
        """See `UpdateRule`."""
        self.context = context
        state, layout, topology = State(), context.layout, context.topology
        self._adam = AdamMoments(context, state)
        self._interval = Interval(len(context.groups))
        parameters = len(layout.slots)
        self._touched = state.add_numbers("touched", parameters, torch.int64, check=_check_touched)
        """For each parameter, the bits `_PRESENT` and `_ANCHORED`."""
        state.common["interval"] = self._interval.memory
        state.checks["interval"] = steps_then_numbers(2, freezes=topology.compresses)
        self._mean = MeanGradient(context, state, self._warmup_bits, self._error_dtype)
        compressors: dict[str, Compressor] = {DENSE: self._mean.compressor}
        if topology.compresses:
            block = self.scale_block
            self._signs = ScaledSign(layout, topology.node, context.kernels, self._error_dtype, scale_block=block)
            state.include(self._signs.state())
            state.whole["anchor"] = untouched_zeros(layout.size, torch.float32, layout.device)
            state.differing.append("m")  # after the freeze, each worker's own
            words, one_rank = self._signs.payload.block_words, layout.slices == 1
            self._own = LocalMomentum(self._adam.m, words) if one_rank else NodeMomentum(context.kernels, words)
            compressors |= {SIGNS: self._signs, LOCAL: self._own}
        self._variance_updates = state.add_numbers("variance_updates", parameters, torch.int64)
        return compressors, state

    def compared_state(self) -> Tensors:
        """See `UpdateRule`."""
        return {"v": self._adam.v}

    def progress(self) -> dict[str, Any]:
        """See `UpdateRule`."""
        return {
            "the last step before the variance was frozen": self._interval.frozen_at or "none yet",
            "the number of local steps since ranks were equal": self._interval.local_steps,
        }

    # A step ----------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """See `UpdateRule`."""
        self._interval.read()
        self._read_rates()
        if self._interval.frozen_at:
            self._mean.release()

    def channel(self) -> str:
        """See `UpdateRule`."""
        if not self.context.topology.compresses:
            return DENSE
        if self._interval.frozen_at:
            return SIGNS if self._since_freeze() % self._interval_length() == 0 else LOCAL
        return DENSE if self.context.step in self._variance_steps else SIGNS

    def _since_freeze(self) -> int:
        return self.context.step - self._interval.frozen_at

    def _interval_length(self) -> int:
        scaler, clipper = self._schedule["local_step_scaler"], self._schedule["local_step_clipper"]
        return local_interval(self._since_freeze(), scaler, clipper)

    def earlier_presence(self) -> list[int] | None:
        """See `UpdateRule`. A synchronization includes the gradients of the local steps before it."""
        return self._presence_since() if self._interval.frozen_at and self.channel() == SIGNS else None

    def _presence_since(self) -> list[int]:
        presence = [0] * len(self.context.layout.buckets)
        parts_of = self.context.session.channels[SIGNS].buffers.parts
        for parts, touched in zip(parts_of, self._touched.now, strict=True):
            if touched & _PRESENT:
                for part in parts:
                    presence[part.frame.bucket.index] |= part.presence
        return presence

    @property
    def skips_together(self) -> bool:
        """See `UpdateRule`."""
        return not self.context.session.uses(LOCAL)

    def before_exchange(self) -> None:
        """See `UpdateRule`."""
        # Read once per step: a scheduler may change a rate between what backward encodes and what step() encodes.
        self._read_rates()
        if self._interval.frozen_at and not self.context.session.repeating:
            length = self._interval_length()
            left = length - (self._since_freeze() - 1) % length  # less than a whole interval after synchronize()
            shrinks = self._interval.shrinks(self._rates, left)
            if min(shrinks, default=1.0) < _FALL:
                factors = [shrink if shrink < _FALL else 1.0 for shrink in shrinks]
                self._signs.scale_residuals([factors[group] for group in self.context.group_index])

    def _read_rates(self) -> None:
        """Read, for each group, its learning rate with bias correction and its weight-decay factor for one step."""
        groups, step = self.context.groups, self.context.step
        self._rates = [float(group["lr"]) * correction(group["betas"][0], step) for group in groups]
        self._decays = [1.0 - float(group["lr"]) * group["weight_decay"] for group in groups]

    def encode(self, position: int, part: Part, grad: Tensor | None, group: Group, scale: Scale) -> bool | None:
        """See `UpdateRule`."""
        session, scale = self.context.session, signed(scale, group)
        if session.uses(DENSE):
            return self._mean.encode(part, grad, scale)
        if not self._interval.frozen_at:
            return self._signs.encode(part, grad, beta=0.0, weight=1.0, scale=scale)
        return self._signs.encode_momentum(
            part,
            grad,
            self._adam.m,
            beta=group["betas"][0],
            scale=scale,
            rate=self._rates[self.context.group_index[position]],
            packets=session.channel.buffers.sent,
            output=self._own.output if session.uses(LOCAL) else Output.SIGNS,
        )

    def settle(self, flags: int) -> int:
        """See `UpdateRule`."""
        session = self.context.session
        if session.uses(SIGNS):
            self._signs.read_answers()
        if not self._interval.frozen_at:
            return flags
        after_local_steps = self._interval.local_steps > 0
        self._interval.add_step(self._rates, self._decays, local=session.uses(LOCAL))
        self._totals = self._interval.totals()
        for position in self.present():
            self._touched.now[position] |= _PRESENT
        if session.uses(LOCAL):
            self._signs.sent_scales.zero_()  # already subtracted from the residuals
        elif after_local_steps:
            flags &= ~packet.NONFINITE  # a skipped step would lose the local steps before it
        return flags

    def apply(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: Group) -> None:
        """See `UpdateRule`."""
        if self.context.session.uses(LOCAL):
            self._apply_local(position, parts, x, low)
        elif self._interval.frozen_at:
            self._apply_agreed(position, parts, x, low)
        else:
            self._apply_shared(position, parts, x, low, group)

    def _apply_shared(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: Group) -> None:
        """AdamW with a gradient that all workers share: dense, or in signs, which do not update the variance."""
        dense, updates, eps = self.context.session.uses(DENSE), self._variance_updates.now[position], group["eps"]
        if not dense or self._adam.updates.now[position] > updates:  # the momentum contains signs
            eps = max(eps, self._adam.floor(position, updates, self._variance_floor))
        self._variance_updates.now[position] += dense
        gradient, updates = self._mean.floats if dense else self._signs, updates + dense
        self._adam.apply(position, parts, x, low, group, variance_updates=updates, eps=eps, gradient=gradient)

    def _apply_local(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None) -> None:
        group = self.context.group_index[position]
        anchored = self._touched.now[position] & _ANCHORED
        anchor = None if anchored else self.context.state_of[position]["anchor"]
        for part in parts:
            runs, values = self._own.momentum(part)
            rate, decay = self._rates[group], self._decays[group]
            self.context.kernels.step_apply(runs, x, low, self._adam.v, values, rate=rate, decay=decay, anchor=anchor)
        self._touched.now[position] |= _ANCHORED

    def _apply_agreed(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None) -> None:
        sums, decays = self._totals
        group = self.context.group_index[position]
        if sums[group] < _SMALLEST:
            return  # no worker has moved, and the momentum below would divide by zero
        anchored = self._touched.now[position] & _ANCHORED
        anchor = self.context.state_of[position]["anchor"] if anchored else None
        for part in parts:
            self.context.kernels.sign_apply(
                part.down_runs,
                x,
                low,
                self._adam.v,
                self._signs.answer,
                self._signs.answer_scales,
                rate=1.0,
                decay=decays[group],
                anchor=anchor,
                m=self._adam.m,
                momentum=1.0 / sums[group],
            )

    def end_step(self) -> None:
        """See `UpdateRule`."""
        frozen, step = self._interval.frozen_at, self.context.step
        if frozen and self.context.session.uses(SIGNS):
            self._end_interval()
        elif self.context.topology.compresses and not frozen and step >= self._freeze_step:
            self._adam.freeze_variance(self._variance_updates.now, self._variance_floor)
            self._signs.reset()
            self._interval.freeze(step)

    def _end_interval(self) -> None:
        self._interval.end()
        self._touched.now = [0] * len(self._touched.now)

    # Replicas --------------------------------------------------------------------------------------------------------

    @property
    def is_synchronized(self) -> bool:
        """See `UpdateRule`."""
        return not self._interval.local_steps

    def synchronize(self, apply_all: Callable[[], None]) -> None:
        """See `UpdateRule`."""
        session = self.context.session
        session.begin_step(self.context.step, SIGNS, flags=packet.SYNCHRONIZE, earlier=self._presence_since())
        session.repeat(SIGNS, RuleEncoder(self))
        self._signs.read_answers()
        self._totals = self._interval.totals()
        apply_all()
        self._end_interval()

    def agreed_value(self, position: int) -> Tensor:
        """See `UpdateRule`."""
        if self._touched.now[position] & _ANCHORED:
            return self.context.state_of[position]["anchor"].to(self.context.params[position].dtype)
        return super().agreed_value(position)

    # Continuing on other ranks ---------------------------------------------------------------------------------------

    @property
    def needs_compression(self) -> bool:
        """See `UpdateRule`."""
        return bool(self._interval.frozen_at)

    def portable(self, state: State, *, private: bool) -> State:
        """See `UpdateRule`."""
        whole = {name: values for name, values in state.whole.items() if name != "anchor"}
        own: Tensors = {}
        owned: Tensors = {}
        if private and self.context.topology.compresses:
            residuals = self._mean.residuals()
            self._signs.scale_residuals([1.0] * len(self.context.params))
            own |= {**residuals.own, "sent": self._signs.sent}
            owned |= {**residuals.owned, "answered": self._signs.answered}
        if self._interval.frozen_at:
            # Each worker has its own momentum, and a rank keeps only that of its own slices.
            m, buckets = whole.pop("m"), self.context.layout.buckets
            own["m"] = torch.cat([m[b.own_start : b.own_start + b.slice_elements] for b in buckets])
        return State(own, whole, owned, layers=state.layers, common=state.common)

    def anchors(self) -> dict[int, Tensor]:
        """See `UpdateRule`."""
        states = enumerate(zip(self.context.state_of, self._touched.now, strict=True))
        return {position: state["anchor"] for position, (state, touched) in states if touched & _ANCHORED}

    def inherit(self, values: Mapping[str, Tensor], anchors: Mapping[int, Tensor]) -> None:
        """See `UpdateRule`."""
        if self.is_synchronized:
            return
        for position, anchor in anchors.items():
            self.context.set_value(position, anchor)
        sums, decays = self._interval.totals()
        for position, touched in enumerate(self._touched.now):
            group = self.context.group_index[position]
            # "reset" drops the residuals, and the progress of the workers with them: one buffer holds both.
            if touched & _PRESENT and sums[group] >= _SMALLEST and "sent" in values:
                self._step_together(position, values, sums[group], decays[group])
        self._end_interval()
        self._touched.write()

    def _step_together(self, position: int, values: Mapping[str, Tensor], rates: float, decay: float) -> None:
        """Synchronize a parameter without compression, in float64, with a single rounding at the end."""
        context = self.context
        p, slot = context.params[position], context.layout.slots[position]
        sent, answered, v, m = (
            context.layout.view(flat, slot, p)
            for flat in (values["sent"], values["answered"], self._adam.v, self._adam.m)
        )
        u = (sent + answered).to(v.device)
        x = context.master(position).double()
        context.set_value(position, torch.where(v > 0, x * decay - u * v, x))
        m.copy_(u / rates)
        context.state_of[position]["sent"].zero_()
        context.state_of[position]["answered"].zero_()


def _check_touched(bits: Tensor, step: int) -> str | None:
    return None if int(bits) in range((_PRESENT | _ANCHORED) + 1) else "has bits other than PRESENT and ANCHORED"

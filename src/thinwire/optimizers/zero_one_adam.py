"""0/1 Adam: ever rarer updates of the variance, 1-bit gradients between them, and then local steps.

Yucheng Lu, Conglong Li, Minjia Zhang, Christopher De Sa, Yuxiong He: "Maximizing Communication Efficiency for
Large-scale Training via 0/1 Adam". ICLR 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire._checks import INT64_MAX, is_integer
from thinwire.kernels.modes import Output, Scale
from thinwire.optimizers._adam import DENSE, SIGNS, check_error_dtype, check_floor, correction, signed
from thinwire.optimizers._intervals import local_interval, variance_steps
from thinwire.optimizers._local_steps import ANCHORED, PRESENT, SMALLEST, LocalSteps
from thinwire.optimizers._options import Unpack, WireOptions
from thinwire.optimizers._paper import LOCAL
from thinwire.optimizers._state import State
from thinwire.transport import packet
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.layout import Layout


class ZeroOneAdam(LocalSteps):
    r"""0/1 Adam (Lu et al., ICLR 2023): between zero and one bit a parameter and step.

    Up to `var_freeze_step` steps are of two kinds. Variance steps, ever further apart, are AdamW's on the exact mean
    gradient. In the others gradients travel as scaled signs C(y) = ‖y‖₂/√len · sign(y) with error feedback, and update
    the momentum only::

        m ← β1 m + (1-β1) C( mean_i C(g_i + e_i) + ē )        x ← (1 - lr·λ) x - lr · m̂ / (√v̂ + ε)

    After that every worker takes local steps with its own momentum, whose sum u_i it exchanges ever more rarely, in
    scaled signs; then all go back to where they last agreed and take the same step instead::

        m_i ← β1 m_i + (1-β1) g_i      u_i ← u_i + α m_i      x_i ← (1 - lr·λ) x_i - α m_i / (√v̂ + ε)
        u ← C( mean_i C(u_i + e_i) + ē )      m_i ← u / Σα      x_i ← Π(1 - lr·λ) x_then - u / (√v̂ + ε)

    Between two synchronisations replicas differ on purpose; after one they are equal to the bit. Call `synchronize()`
    before you evaluate or save a model, and before you change its weights, which the next synchronisation would undo;
    `is_synchronized` tells.

    Example::

        model = DDP(net)
        opt = thinwire.ZeroOneAdam(model.parameters(), lr=1e-3, var_freeze_step=1000, local_step_scaler=1000)
        thinwire.attach(model, opt)
        ...
        loss.backward(); opt.step(); opt.zero_grad()
        ...
        opt.synchronize()          # on all ranks, before evaluating or saving

    Args:
        params: parameters or groups of them, as in torch.optim. Groups may have their own `lr`, `betas`, `eps`,
            `weight_decay` and `maximize`.
        lr: step size, AdamW's.
        betas: decay of the momentum and of the variance; the latter counts variance steps.
        eps: added to √v̂, as in AdamW.
        weight_decay: decoupled decay λ, as in AdamW. It never gets into the momentum.
        var_freeze_step: the last step that may update the variance, and the last before local steps.
        var_update_scaler: so many variance steps follow each other, then as many two steps apart, four apart, and so
            on.
        variance_floor: where signs are divided by √v̂, it counts for at least this part of its root mean square in the
            parameter, as in `thinwire.OneBitAdam`.
        local_step_scaler: the interval between synchronisations doubles every so many steps after `var_freeze_step`.
        local_step_clipper: the longest interval.
        maximize: ascend instead of descend.
        error_dtype: of the two error memories, of which the worker's also holds u_i. torch.bfloat16 halves them, and is
            for a small `local_step_clipper`: steps of less than a 512th of u_i would be lost.
        process_group: the ranks that train together; the default group if None.
        topology: "flat", "hierarchical" or "auto", as in `thinwire.Birder`. In a hierarchical one the node is the
            worker: its ranks average over their link at every step, and differ from other nodes only.
        mesh: a two-dimensional DeviceMesh of the same ranks, a row a node, where LOCAL_WORLD_SIZE does not tell.
        node_dtype: of gradients on the link inside a node: torch.float32, or torch.bfloat16 for half the bytes.
        bucket_mb: size of an exchange, in megabytes of fp32 gradient; if None a quarter of the model, within 4 to 32.
            Scales belong to shards of buckets, so results depend on it.
        max_consecutive_skips: after so many steps in a row that were skipped for gradients that are not finite, step()
            raises TooManySkips; None for never.
        check_replicas_every: compare a hash of the parameters over all ranks after every so many steps; 0 for never.

    When not to use it:
        When replicas must be equal at every step: batch-norm statistics, evaluation or sampling in the training loop
        see one worker's weights. When workers' data differ in kind, local steps drift apart: keep `local_step_clipper`
        small, 1 for none. For short runs, most of which are variance steps, use `thinwire.Birder`.

    Gradient clipping:
        Under `attach` gradients are on their way before `clip_grad_norm_` sees them, so that it has no effect. Without,
        it scales a worker's own gradient, another factor on each rank.

    Differences from the paper:
        * Bias correction as in Adam: of the variance by the number of its updates, up to the freeze, of the momentum
          throughout; decoupled weight decay.
        * What has been applied is not subtracted again, which would leave roundings behind: replicas return to a copy
          of where they last agreed. The decay since then is that of the copy.
        * The sum of steps is kept before the division by √v̂ + ε, and together with the error.
        * When learning rates fall by more than a hundredth from one interval to the next, errors shrink with them: they
          are multiples of the rates of their time, and u / Σα would make a large momentum of them.
        * A scale a shard of a bucket, and the floor of the variance. A coordinate without any gradient up to the freeze
          (v = 0) stays where it is.
        * A gradient that is not finite: before the freeze all workers skip the step. After it a worker alone skips its
          local step; a synchronising step is skipped by all if no local steps came before it, else taken without
          the elements that are not finite.
        * A gradient of more than 2⁶⁰ counts as one that is not finite: its square would stay in the variance.
        * In a hierarchical topology of a single node nothing is compressed, and every step is AdamW's.
    """

    _state_has_buckets = True

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
        variance_floor: float = 0.1,
        local_step_scaler: int = 1000,
        local_step_clipper: int = 16,
        maximize: bool = False,
        error_dtype: torch.dtype = torch.float32,
        **wire: Unpack[WireOptions],
    ) -> None:
        schedule = {
            "var_freeze_step": var_freeze_step,
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
        }
        for name, value in schedule.items():
            if not is_integer(value, 1, INT64_MAX):
                raise ValueError(f"{name}={value!r}: expected a positive number of steps")
        if var_freeze_step < var_update_scaler:
            raise ValueError(
                f"var_freeze_step={var_freeze_step}: the variance would be frozen before the first "
                f"var_update_scaler={var_update_scaler} updates of it. Expected at least {var_update_scaler}"
            )
        check_error_dtype(error_dtype)
        check_floor(variance_floor)
        self._schedule = schedule
        self._variance_floor = variance_floor
        self._var_freeze_step = var_freeze_step
        self._local_steps = (local_step_scaler, local_step_clipper)
        self._variance_steps = variance_steps(var_update_scaler, var_freeze_step)
        self._error_dtype = error_dtype
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, **wire)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Make all replicas equal now. To be called on all ranks, after `step()`; does nothing if they are equal.

        Raises:
            RuntimeError: between backward and `step()`, when gradients are on their way already; on all ranks, when
                some did not call it.
        """
        if any(self._encoded):
            raise RuntimeError("synchronize() between backward and step(): call it after step(), on all ranks")
        if self.is_synchronized:
            return
        self._prepare()
        self._presence.before = self._presence_since()
        self._flags_sent = packet.SYNCHRONIZE
        with self._open_transport().abort_on_error():
            self._exchange_again(SIGNS)
            self._signs.adopt()
            self._totals = self._interval.of_groups()
            self._apply_all()
            self._end_interval()
            super()._end_step()
            self._begin_step()

    # What a paper says -----------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        own = {**self._schedule, "variance_floor": self._variance_floor, "error_dtype": str(self._error_dtype)}
        return {**super()._settings(), **own}

    def _declare(self, layout: Layout) -> tuple[dict[str, Compressor], State]:
        compressors, state = super()._declare(layout)
        self._variance_updates = self._layer_numbers("variance_updates", state, layout, torch.int64)
        return compressors, state

    def _channel_now(self) -> str:
        if not self._topology.compresses:
            return DENSE
        if self._interval.frozen_at:
            return SIGNS if self._since_freeze() % self._interval_length() == 0 else LOCAL
        return DENSE if self._step_number in self._variance_steps else SIGNS

    def _since_freeze(self) -> int:
        return self._step_number - self._interval.frozen_at

    def _interval_length(self) -> int:
        return local_interval(self._since_freeze(), *self._local_steps)

    def _begin_step(self) -> None:
        """See `WireOptimizer._begin_step`."""
        self._interval.read()
        super()._begin_step()
        self._read_rates()
        if self._interval.frozen_at:
            self._channels[DENSE].release()
            if self._on(SIGNS):
                self._presence.before = self._presence_since()

    @property
    def _skips_together(self) -> bool:
        return not self._on(LOCAL)

    def _before_exchange(self) -> None:
        # Once for the whole step: backward may encode parameters before, and step() others after, a change.
        self._read_rates()
        if self._interval.frozen_at and not self._repeats:
            length = self._interval_length()
            left = length - (self._since_freeze() - 1) % length  # less than all of it after synchronize()
            shrinks = self._interval.shrinks(self._rates, left)
            if min(shrinks, default=1.0) < _FALL:
                factors = [shrink if shrink < _FALL else 1.0 for shrink in shrinks]
                self._signs.fade([factors[group] for group in self._group_index])

    def _read_rates(self) -> None:
        """For each group its learning rate with bias correction, and what weight decay leaves in a step."""
        groups = self.param_groups
        self._rates = [float(group["lr"]) * correction(group["betas"][0], self._step_number) for group in groups]
        self._decays = [1.0 - float(group["lr"]) * group["weight_decay"] for group in groups]

    def _local(
        self, position: int, part: Part, grad: Tensor | None, group: dict[str, Any], scale: Scale
    ) -> bool | None:
        if self._on(DENSE):
            return super()._local(position, part, grad, group, scale)
        scale = signed(scale, group)
        if not self._interval.frozen_at:
            return self._signs.encode(part, grad, beta=0.0, weight=1.0, scale=scale)
        return self._signs.encode_momentum(
            part,
            grad,
            self._m,
            beta=group["betas"][0],
            scale=scale,
            rate=self._rates[self._group_index[position]],
            packets=self._channel.buffers.sent,
            output=self._own.output if self._on(LOCAL) else Output.SIGNS,
        )

    def _settle(self, flags: int) -> int:
        if self._on(SIGNS):
            self._signs.adopt()
        if not self._interval.frozen_at:
            return flags
        alone = not self._interval.local_steps
        self._interval.note(self._rates, self._decays, local=self._on(LOCAL))
        self._totals = self._interval.of_groups()
        for position in self._present():
            self._touched.now[position] |= PRESENT
        if self._on(LOCAL):
            self._signs.sent_scales.zero_()  # errors have been taken, there is nothing to take from them any more
        elif not alone:
            flags &= ~packet.NONFINITE  # local steps must not be lost
        return flags

    def _apply(
        self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: dict[str, Any]
    ) -> None:
        if self._on(LOCAL):
            self._apply_local(position, parts, x, low)
        elif self._interval.frozen_at:
            self._apply_agreed(position, parts, x, low)
        else:
            self._apply_shared(position, parts, x, low, group)

    def _apply_shared(
        self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: dict[str, Any]
    ) -> None:
        """AdamW by a gradient that all workers have: in floats, or in signs, which leave the variance alone."""
        dense, updates, eps = self._on(DENSE), self._variance_updates.now[position], group["eps"]
        if not dense or self._updates.now[position] > updates:  # there are signs in the momentum
            eps = max(eps, self._floor(position, updates, self._variance_floor))
        self._variance_updates.now[position] += dense
        signs = None if dense else self._signs
        self._apply_gradient(position, parts, x, low, group, updates + dense, eps, signs)

    def _apply_local(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None) -> None:
        group = self._group_index[position]
        anchored = self._touched.now[position] & ANCHORED
        anchor = None if anchored else self._kept_of[position]["anchor"]
        for part in parts:
            runs, values = self._own.momentum(part)
            self._kernels.step_apply(
                runs, x, low, self._v, values, rate=self._rates[group], decay=self._decays[group], anchor=anchor
            )
        self._touched.now[position] |= ANCHORED

    def _apply_agreed(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None) -> None:
        sums, decays = self._totals
        group = self._group_index[position]
        if sums[group] < SMALLEST:
            return  # nobody has moved, and there is nothing to divide by
        anchored = self._touched.now[position] & ANCHORED
        anchor = self._kept_of[position]["anchor"] if anchored else None
        for part in parts:
            self._kernels.sign_apply(
                part.down_runs,
                x,
                low,
                self._v,
                self._signs.answer,
                self._signs.answer_scales,
                rate=1.0,
                decay=decays[group],
                anchor=anchor,
                m=self._m,
                momentum=1.0 / sums[group],
            )

    def _end_step(self) -> None:
        if self._interval.frozen_at and self._on(SIGNS):
            self._end_interval()
        elif self._topology.compresses and not self._interval.frozen_at and self._step_number >= self._var_freeze_step:
            self._freeze_variance(self._variance_updates.now, self._variance_floor)
            self._signs.forget()
            self._interval.freeze(self._step_number)
        super()._end_step()


_FALL = 0.99
"""When learning rates fall by more than this, errors shrink with them."""

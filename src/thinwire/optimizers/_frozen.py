"""A dense warm-up, after which the variance is frozen and momenta travel as scaled signs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.compressors.scaled_sign import ScaledSign
from thinwire.optimizers import _warmup
from thinwire.optimizers._adam import DENSE, SIGNS, AdamFamily, check_error_dtype, check_floor, keep_signs
from thinwire.optimizers._options import Unpack, WireOptions
from thinwire.optimizers._state import State, steps_then_numbers
from thinwire.optimizers._warmup import Warmup
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.layout import Layout


class FrozenVariance(AdamFamily):
    """What 1-bit Adam and 1-bit LAMB share: when and how the one stage follows the other.

    All memory is there from the start. Error memories are not touched before the switch, and dense packets are given
    back at it, so that both stages together need no more than the larger one.
    """

    _state_has_buckets = True
    _remembers = False
    """Whether the rule needs the momentum as it was one step before."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        warmup_steps: _warmup.Length,
        total_steps: int | None,
        variance_floor: float,
        maximize: bool,
        error_dtype: torch.dtype,
        **wire: Unpack[WireOptions],
    ) -> None:
        check_error_dtype(error_dtype)
        check_floor(variance_floor)
        self._warmup_steps: _warmup.Length = warmup_steps
        self._variance_floor = variance_floor
        self._error_dtype = error_dtype
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, **wire)
        _warmup.warn_of_dense_run(warmup_steps, total_steps, self._largest_beta2())

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        _warmup.check(self._warmup_steps, group["betas"][1])

    def _largest_beta2(self) -> float:
        return max((group["betas"][1] for group in self.param_groups), default=0.0)

    def _settings(self) -> dict[str, Any]:
        return {
            **super()._settings(),
            "warmup_steps": self._warmup_steps,
            "variance_floor": self._variance_floor,
            "error_dtype": str(self._error_dtype),
        }

    def _progress(self) -> dict[str, Any]:
        return {**super()._progress(), "the last step of the warm-up": self._warmup.ended_at or "none yet"}

    def _declare(self, layout: Layout) -> tuple[dict[str, Compressor], State]:
        compressors, state = super()._declare(layout)
        self._warmup = Warmup(self._warmup_steps, self._largest_beta2(), len(self.param_groups))
        state.common["warmup"] = self._warmup.memory
        state.checks["warmup"] = steps_then_numbers(2, freezes=self._topology.compresses)
        if self._topology.compresses:
            # The momentum as it was before the switch is not needed after it: what is kept of it then takes its place.
            memory = self._m.view(self._error_dtype)[: layout.own_size]
            self._signs = ScaledSign(
                layout, self._topology.node, self._kernels, self._error_dtype, memory, remembers=self._remembers
            )
            keep_signs(state, self._signs)
            compressors[SIGNS] = self._signs
        return compressors, state

    @property
    def _compressing(self) -> bool:
        return self._on(SIGNS)

    def _channel_now(self) -> str:
        return SIGNS if self._warmup.ended_at else DENSE

    def _begin_step(self) -> None:
        """See `WireOptimizer._begin_step`."""
        super()._begin_step()
        if self._compressing:
            self._channels[DENSE].release()

    def _settle(self, flags: int) -> int:
        if self._compressing:
            self._signs.adopt()
        return flags

    def _end_step(self) -> None:
        if self._topology.compresses and not self._compressing:
            rates = [float(group["lr"]) for group in self.param_groups]
            if self._warmup.over(self._step_number, math.fsum(self._variances.now), rates):
                self._channels[DENSE].release()  # first: what comes now touches memory of its own
                self._switch()
        super()._end_step()

    def _switch(self) -> None:
        """From the dense stage to the compressed one."""
        factors = [self._group_of(i)["betas"][0] * self._weight(i) for i in range(len(self._flat_params))]
        self._signs.start_from(self._m, factors)
        self._freeze_variance(self._updates.now, self._variance_floor)

    def _weight(self, position: int) -> float:
        """What a parameter's momentum is multiplied by on the wire."""
        return 1.0

    def _apply_signs(self, part: Part, x: Tensor, low: Tensor | None, *, rate: float, decay: float) -> None:
        """Step by the momentum that all have just heard, with the frozen variance."""
        self._kernels.sign_apply(
            part.down_runs,
            x,
            low,
            self._v,
            self._signs.answer,
            self._signs.answer_scales,
            rate=rate,
            decay=decay,
            anchor=None,
            m=None,
            momentum=0.0,
        )

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim. Memory of two dtypes, which torch.save refuses, is copied."""
        saved = super().state_dict()
        if self._topology.compresses and self._error_dtype != self._m.dtype:
            states = saved["state"].items()
            saved["state"] = {index: {**state, "sent": state["sent"].clone()} for index, state in states}
        return saved

    # When a run goes on with other ranks -----------------------------------------------------------------------------

    def _portable(self, *, private: bool) -> State:
        kept = self._kept
        # Of the momentum and of what takes its place only one counts, and answers mean nothing without their shards.
        state = State(whole=dict(kept.whole), layers=kept.layers, common=kept.common)
        if not self._compressing:
            return state
        del state.whole["m"]
        signs = self._signs
        if not private:
            signs.sent.zero_()
            signs.sent_scales.zero_()
        # What a worker would send next without a gradient: its error, and what is left of the momentum that all share.
        for position, parts in enumerate(self._channel.buffers.parts):
            for part in parts:
                self._local(position, part, None, self._group_of(position), 1.0)
        signs.sent_scales.zero_()  # it has not been sent
        signs.fade([1.0] * len(self._flat_params))
        return replace(state, own={"sent": signs.sent}, owned={"answered": signs.answered} if private else {})

    @property
    def _needs_compression(self) -> bool:
        return self._compressing

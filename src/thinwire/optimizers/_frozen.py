"""A dense warm-up, after which the variance is frozen and momenta travel as scaled signs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import ParamsT

from thinwire.codecs import Codec
from thinwire.codecs.sign import ScaledSign
from thinwire.optimizers import _warmup
from thinwire.optimizers._adam import DENSE, SIGNS, AdamFamily, check_error_dtype, keep_signs
from thinwire.optimizers._state import State
from thinwire.optimizers._warmup import Warmup
from thinwire.wire.buckets import Layout
from thinwire.wire.mail import Part
from thinwire.wire.topology import Choice


class FrozenVariance(AdamFamily):
    """What 1-bit Adam and 1-bit LAMB share: when and how the one stage follows the other.

    All memory is there from the start. Error memories are not touched before the switch, and dense packets are given
    back at it, so that both stages together need no more than the larger one.
    """

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
        maximize: bool,
        error_dtype: torch.dtype,
        process_group: dist.ProcessGroup | None,
        topology: Choice,
        mesh: DeviceMesh | None,
        node_dtype: torch.dtype,
        bucket_mb: float | None,
    ) -> None:
        check_error_dtype(error_dtype)
        self._warmup_steps: _warmup.Length = warmup_steps
        self._total_steps = total_steps
        self._error_dtype = error_dtype
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            maximize=maximize,
            process_group=process_group,
            topology=topology,
            mesh=mesh,
            node_dtype=node_dtype,
            bucket_mb=bucket_mb,
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        _warmup.check(self._warmup_steps, self._total_steps, group["betas"][1])

    def _settings(self) -> dict[str, Any]:
        return {
            **super()._settings(),
            "warmup_steps": self._warmup_steps,
            "error_dtype": str(self._error_dtype),
        }

    def _declare(self, layout: Layout) -> tuple[dict[str, Codec], State]:
        codecs, state = super()._declare(layout)
        beta2 = max((group["betas"][1] for group in self.param_groups), default=0.0)
        self._warmup = Warmup(self._warmup_steps, beta2, len(self.param_groups))
        state.common["warmup"] = self._warmup.memory
        if self._topology.compresses:
            # The momentum as it was before the switch is not needed after it, and has the right size.
            fits = self._error_dtype == torch.float32 and layout.slices == 1
            memory = self._m if fits else None
            self._signs = ScaledSign(
                layout, self._topology.node, self._kernels, self._error_dtype, memory, remembers=self._remembers
            )
            keep_signs(state, self._signs)
            codecs[SIGNS] = self._signs
        return codecs, state

    @property
    def _compressing(self) -> bool:
        return self._channel is self._channels.get(SIGNS)

    def _channel_now(self) -> str:
        return SIGNS if self._warmup.ended_at else DENSE

    def _begin_step(self) -> None:
        """See `WireOptimizer._begin_step`."""
        super()._begin_step()
        if self._compressing:
            self._channels[DENSE].release()
        self._variance = 0.0
        """The sum of all variances after this step, once it is taken."""
        self._taken = False

    def _settle(self, flags: int) -> int:
        if self._compressing:
            self._signs.adopt()
        return flags

    def _conclude(self) -> None:
        self._taken = True

    def _end_step(self) -> None:
        if self._compressing or not self._topology.compresses:
            return
        rates = [float(group["lr"]) for group in self.param_groups]
        if self._warmup.over(self._step_number, self._variance if self._taken else None, rates):
            self._switch()

    def _switch(self) -> None:
        """From the dense stage to the compressed one."""
        factors = [self._group_of(i)["betas"][0] * self._weight(i) for i in range(len(self._flat_params))]
        self._signs.start_from(self._m, factors)
        self._freeze_variance(self._updates)

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

"""What those optimizers have in common that are made like torch's AdamW, and those that average gradients exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.compressors.dense import Dense
from thinwire.compressors.scaled_sign import ScaledSign
from thinwire.kernels.modes import Scale
from thinwire.optimizers._base import WireOptimizer
from thinwire.optimizers._inputs import check_number
from thinwire.optimizers._options import Unpack, WireOptions
from thinwire.optimizers._state import Check, LayerNumbers, State, Tensors, amounts, counts
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.layout import Layout

DENSE = "dense"
SIGNS = "signs"
SQUARABLE = 2.0**60
"""The largest gradient that is squared. The square of a larger one may not be a float32, and would stay in the variance
for good: a step with such a gradient is skipped, as one with an infinite gradient is."""


class AdamLike(WireOptimizer):
    """Takes the arguments of torch's AdamW, and keeps numbers a parameter."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        maximize: bool,
        **wire: Unpack[WireOptions],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **wire)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_number(group, "lr")
        check_number(group, "eps", above=True)
        check_number(group, "weight_decay")
        betas = group["betas"]
        if not (
            isinstance(betas, (tuple, list))
            and len(betas) == 2
            and all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas)
        ):
            raise ValueError(f"betas={betas!r}: expected two numbers in [0, 1)")

    def _build(self) -> None:
        self._layers: list[LayerNumbers] = []
        super()._build()

    def _layer_numbers(
        self, name: str, state: State, layout: Layout, dtype: torch.dtype, start: float = 0, check: Check | None = None
    ) -> LayerNumbers:
        """Numbers that are added to the state, read at the beginning of a step and written at its end.

        Unless `check` says otherwise integers count steps, and floats are finite and not negative.
        """
        numbers = LayerNumbers(len(layout.slots), dtype, start)
        self._layers.append(numbers)
        state.layers[name] = numbers.tensor
        state.checks[name] = check or (amounts if dtype.is_floating_point else counts)
        return numbers

    def _begin_step(self) -> None:
        """See `WireOptimizer._begin_step`."""
        super()._begin_step()
        for numbers in self._layers:
            numbers.read()

    def _end_step(self) -> None:
        for numbers in self._layers:
            numbers.write()

    def _take_back(self, updates: LayerNumbers, positions: Sequence[int]) -> None:
        """Count one update less of some parameters."""
        for position in positions:
            updates.now[position] -= 1
        updates.write()


class AdamFamily(AdamLike):
    """Keeps Adam's `m` and `v`, and can exchange gradients as they are."""

    def _settings(self) -> dict[str, Any]:
        # Scales belong to shards of buckets: other buckets would be another run.
        return {"bucket_mb": self._bucket_mb}

    def _declare(self, layout: Layout) -> tuple[dict[str, Compressor], State]:
        self._m = torch.zeros(layout.size, dtype=torch.float32, device=layout.device)
        self._v = torch.zeros(layout.size, dtype=torch.float32, device=layout.device)
        state = State(whole={"m": self._m, "v": self._v})
        self._updates = self._layer_numbers("updates", state, layout, torch.int64)
        """How often each parameter has been updated, for bias correction."""
        self._variances = self._layer_numbers("variance", state, layout, torch.float64)
        """The sum of each parameter's `v`."""
        self._dense = Dense(self._kernels)
        return {DENSE: self._dense}, state

    def _agreed_state(self) -> Tensors:
        return {"v": self._v}

    def _on(self, name: str) -> bool:
        """Whether the step under way uses this channel."""
        return self._channel is self._channels.get(name)

    def _local(
        self, position: int, part: Part, grad: Tensor | None, group: dict[str, Any], scale: Scale
    ) -> bool | None:
        return self._dense.encode(part, grad, signed(scale, group), SQUARABLE)

    def _apply_gradient(
        self,
        position: int,
        parts: Sequence[Part],
        x: Tensor,
        low: Tensor | None,
        group: dict[str, Any],
        variance_updates: int,
        eps: float,
        signs: ScaledSign | None = None,
    ) -> None:
        """AdamW by the answer: the mean gradient, or where it came as `signs` without an update of the variance."""
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        self._updates.now[position] += 1
        variances = [
            self._kernels.adam_apply(
                part.down_runs,
                x,
                low,
                self._m,
                self._v,
                self._channel.buffers.answers if signs is None else signs.answer,
                None if signs is None else signs.answer_scales,
                beta1=beta1,
                beta2=beta2,
                eps=eps,
                rate=lr * correction(beta1, self._updates.now[position]),
                correction=root_correction(beta2, variance_updates),
                decay=1.0 - lr * group["weight_decay"],
                update_variance=signs is None,
            )
            for part in parts
        ]
        self._variances.now[position] = math.fsum(variances)

    def _floor(self, position: int, variance_updates: int, floor: float) -> float:
        """`floor` times the root of the mean v̂ of a parameter, over those coordinates that have had a gradient."""
        slot = self._layout.slots[position]
        living = int(torch.count_nonzero(self._v[slot.start : slot.start + slot.numel]))
        if not living:
            return 0.0
        beta2 = self._group_of(position)["betas"][1]
        return floor * math.sqrt(self._variances.now[position] / living) * root_correction(beta2, variance_updates)

    def _freeze_variance(self, updates: Sequence[int], floor: float) -> None:
        """Turn every `v` into what it multiplies steps by from now on, 1/(√v̂ + ε), and 0 where it is 0.

        Args:
            updates: how often the variance of each parameter has been updated.
            floor: √v̂ counts for at least this much of its root mean square.
        """
        for position, slot in enumerate(self._layout.slots):
            group = self._group_of(position)
            # By a kernel of ours: torch's roots are not the same on every processor, and replicas must be.
            self._kernels.precondition(
                self._v[slot.start : slot.start + slot.numel],
                correction=root_correction(group["betas"][1], updates[position]),
                floor=self._floor(position, updates[position], floor),
                eps=group["eps"],
            )


def check_floor(floor: float) -> None:
    """Refuse what is no part of anything.

    Raises:
        ValueError: naming the argument.
    """
    if not 0 <= floor <= 1:
        raise ValueError(f"variance_floor={floor!r}: expected a number in [0, 1]")


def check_error_dtype(dtype: torch.dtype) -> None:
    """Refuse what error memories cannot be.

    Raises:
        ValueError: naming the argument.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"error_dtype={dtype!r}: expected torch.float32 or torch.bfloat16")


def keep_signs(state: State, signs: ScaledSign) -> None:
    """Add to a state what scaled signs remember."""
    state.own["sent"] = signs.sent
    state.owned["answered"] = signs.answered
    state.words["answer"] = signs.answer
    state.shards.update(sent_scale=signs.sent_scales, answer_scale=signs.answer_scales)
    if signs.answer_before is not None and signs.answer_scales_before is not None:
        state.words["answer_before"] = signs.answer_before
        state.shards["answer_scale_before"] = signs.answer_scales_before


def signed(scale: Scale, group: dict[str, Any]) -> Scale:
    """The factor of a gradient: negative to ascend."""
    return -scale if group["maximize"] else scale


def correction(beta: float, updates: int) -> float:
    """What an average that began at zero is multiplied by after so many updates."""
    return 1.0 / (1.0 - beta**updates) if updates else 1.0


def root_correction(beta: float, updates: int) -> float:
    """The same for the root of an average."""
    return math.sqrt(correction(beta, updates))

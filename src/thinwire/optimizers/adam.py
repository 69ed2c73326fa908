"""Adam's moments over the flat space, and helpers for the rules whose groups are those of torch's AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire._checks import INT64_MAX, is_integer
from thinwire.compressors.scaled_sign import ScaledSign
from thinwire.kernels.modes import Scale
from thinwire.optimizers.inputs import check_number
from thinwire.optimizers.rule import Context, Group
from thinwire.transport.buffers import Part
from thinwire.transport.layout import WORD
from thinwire.transport.memory import untouched_zeros
from thinwire.transport.state import State

DENSE = "dense"
SIGNS = "signs"
"""Names of the channels for gradients of the dense stage and for scaled signs."""
SQUARABLE = 2.0**60
"""The largest gradient that is squared. The square of a larger one may overflow float32 and would stay in the variance,
so all ranks skip a step with such a gradient, as they do for an infinite one."""
Floats = Callable[[Part], tuple[Tensor, Tensor]]
"""For a part of a parameter, the runs and the bytes into which they point for its mean gradient, as floats."""


class AdamMoments:
    """Adam's m and v, equal on all ranks, and AdamW's step with a gradient that all ranks share.

    Args:
        context: the run.
        state: where the moments and their counters are registered.
    """

    def __init__(self, context: Context, state: State) -> None:
        layout = context.layout
        self._context = context
        self.m = untouched_zeros(layout.size, torch.float32, layout.device)
        self.v = untouched_zeros(layout.size, torch.float32, layout.device)
        state.whole.update(m=self.m, v=self.v)
        self.updates = state.add_numbers("updates", len(layout.slots), torch.int64)
        """The number of updates of each parameter, for bias correction."""
        self.variances = state.add_numbers("variance", len(layout.slots), torch.float64)
        """The sum of each parameter's v."""

    def apply(
        self,
        position: int,
        parts: Sequence[Part],
        x: Tensor,
        low: Tensor | None,
        group: Group,
        *,
        variance_updates: int,
        eps: float,
        gradient: Floats | ScaledSign,
    ) -> None:
        """Take AdamW's step with the mean gradient, or with scaled signs, which do not update the variance.

        Args:
            position, parts, x, low, group: as `UpdateRule.apply`.
            variance_updates: the number of updates of the variance, including this step.
            eps: added to √v̂.
            gradient: reads the mean gradient; or the compressor with the answer, if it was sent as scaled signs.
        """
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        self.updates.now[position] += 1
        variances: list[float | Tensor] = []
        for part in parts:
            if isinstance(gradient, ScaledSign):
                runs, answer, scales = part.down_runs, gradient.answer, gradient.answer_scales
            else:
                (runs, answer), scales = gradient(part), None
            variance = self._context.kernels.adam_apply(
                runs,
                x,
                low,
                self.m,
                self.v,
                answer,
                scales,
                beta1=beta1,
                beta2=beta2,
                eps=eps,
                rate=lr * correction(beta1, self.updates.now[position]),
                correction=root_correction(beta2, variance_updates),
                decay=1.0 - lr * group["weight_decay"],
                update_variance=scales is None,
            )
            variances.append(variance)
        self.variances.now[position] = math.fsum(variances)

    def floor(self, position: int, variance_updates: int, floor: float) -> float:
        """`floor` times the root of a parameter's mean v̂ over the coordinates that have had a gradient."""
        slot = self._context.layout.slots[position]
        active = int(torch.count_nonzero(self.v[slot.start : slot.start + slot.numel]))
        if not active:
            return 0.0
        beta2 = self._context.group_of(position)["betas"][1]
        return floor * math.sqrt(self.variances.now[position] / active) * root_correction(beta2, variance_updates)

    def freeze_variance(self, updates: Sequence[int], floor: float) -> None:
        """Replace every v by the factor of all later steps: 1/(√v̂ + ε), or 0 where v is 0.

        Args:
            updates: the number of updates of each parameter's variance.
            floor: √v̂ is at least this fraction of its root mean square.
        """
        for position, slot in enumerate(self._context.layout.slots):
            group = self._context.group_of(position)
            # A kernel, because torch's square roots differ between processors and replicas must not.
            self._context.kernels.precondition(
                self.v[slot.start : slot.start + slot.numel],
                correction=root_correction(group["betas"][1], updates[position]),
                floor=self.floor(position, updates[position], floor),
                eps=group["eps"],
            )


def check_adam_group(group: Group) -> None:
    """Reject hyper-parameters that torch's AdamW would reject.

    Raises:
        ValueError: naming the hyper-parameter.
    """
    check_number(group, "lr")
    check_number(group, "eps", above=True)
    check_number(group, "weight_decay")
    check_betas(group)


def check_betas(group: Group) -> None:
    """Reject betas that are not two numbers in [0, 1).

    Raises:
        ValueError: naming the hyper-parameter.
    """
    betas = group["betas"]
    if not (
        isinstance(betas, (tuple, list))
        and len(betas) == 2
        and all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas)
    ):
        raise ValueError(f"betas={betas!r}: expected two numbers in [0, 1)")


def adam_defaults(
    lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float, *, maximize: bool
) -> Group:
    """The hyper-parameters of torch's AdamW."""
    return {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}


def check_floor(floor: float) -> None:
    """Reject a variance floor that is not in [0, 1].

    Raises:
        ValueError: naming the argument.
    """
    if not 0 <= floor <= 1:
        raise ValueError(f"variance_floor={floor!r}: expected a number in [0, 1]")


def check_error_dtype(dtype: torch.dtype) -> None:
    """Reject a dtype for residuals other than float32 and bfloat16.

    Raises:
        ValueError: naming the argument.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"error_dtype={dtype!r}: expected torch.float32 or torch.bfloat16")


def check_scale_block(block: int | None) -> None:
    """Reject a number of elements per scale that is not a multiple of 64.

    Raises:
        ValueError: naming the argument.
    """
    if block is not None and not (is_integer(block, WORD, INT64_MAX) and block % WORD == 0):
        raise ValueError(f"scale_block={block!r}: expected a positive multiple of {WORD}, or None for whole shards")


def signed(scale: Scale, group: Group) -> Scale:
    """The factor of a gradient; negative if the group maximizes."""
    return -scale if group["maximize"] else scale


def correction(beta: float, updates: int) -> float:
    """The bias correction, after `updates` updates, of an average that started at zero."""
    return 1.0 / (1.0 - beta**updates) if updates else 1.0


def root_correction(beta: float, updates: int) -> float:
    """The bias correction of the root of such an average."""
    return math.sqrt(correction(beta, updates))

"""A warm-up that averages gradients, then scaled signs with a frozen variance: the stages of 1-bit Adam and LAMB."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire._checks import INT64_MAX, is_integer
from thinwire.compressors.scaled_sign import ScaledSign
from thinwire.kernels.modes import Scale
from thinwire.optimizers.adam import DENSE, SIGNS, AdamMoments, check_error_dtype, check_floor, check_scale_block
from thinwire.optimizers.mean_gradient import MeanGradient, check_warmup_bits
from thinwire.optimizers.rule import Context, Group
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.memory import HOST
from thinwire.transport.state import State, steps_then_numbers

_LOG = logging.getLogger("thinwire")

Length = int | Literal["auto"]
"""A number of steps, or "auto": until the variance has settled."""

STABLE = 0.96
"""The variance has settled when it is at least this fraction of what it was one window ago."""
_CHECKS = 16
"""The number of checks per window."""


def check_length(warmup_steps: Length, beta2: float) -> None:
    """Reject lengths that freeze the variance too early.

    Raises:
        ValueError: naming the argument.
    """
    window = window_of(beta2)
    if warmup_steps != "auto":
        if not is_integer(warmup_steps, 1, INT64_MAX):
            raise ValueError(f"warmup_steps={warmup_steps!r}: expected 'auto' or a positive number of steps")
        if warmup_steps < window:
            raise ValueError(
                f"warmup_steps={warmup_steps}: the variance averages over 1/(1 - beta2) = {window} steps and would be "
                f"frozen too early. Expected at least {window}, or a smaller beta2 than {beta2}"
            )


def warn_of_long_warmup(options: StageOptions, total_steps: int | None, beta2: float) -> None:
    """Warn the caller of an optimizer's constructor if the warm-up takes the whole run.

    Raises:
        ValueError: if `total_steps` is not a number of steps.
    """
    if total_steps is None:
        return
    if not is_integer(total_steps, 1, INT64_MAX):
        raise ValueError(f"total_steps={total_steps!r}: expected a positive number of steps, or None")
    warmup_steps, bits = options.warmup_steps, options.warmup_bits
    least = (_CHECKS + 1) * _steps_between_checks(beta2) if warmup_steps == "auto" else warmup_steps
    if least >= total_steps:
        cost = "is dense and sends as much as DDP" if bits is None else f"sends {bits} bits per parameter"
        warnings.warn(
            f"warmup_steps={warmup_steps!r} with total_steps={total_steps}: the warm-up takes at least {least} steps, "
            f"so the whole run {cost}. Use a smaller beta2, whose variance settles "
            "sooner, or thinwire.Birder, which needs no warm-up",
            RuntimeWarning,
            stacklevel=3,
        )


def window_of(beta2: float) -> int:
    """The number of steps that the variance averages over."""
    return max(1, round(1.0 / (1.0 - beta2)))


def _steps_between_checks(beta2: float) -> int:
    return math.ceil(window_of(beta2) / _CHECKS)


class Warmup:
    """Decides at the end of every step whether the warm-up ends with it.

    The decision depends on one small tensor, which is saved with the state. It is computed from values that are equal
    on all ranks, so the decision is the same on all ranks.

    Args:
        length: of the warm-up in steps, or "auto".
        beta2: of the variance, the largest of all groups.
        groups: the number of parameter groups.
    """

    def __init__(self, length: Length, beta2: float, groups: int) -> None:
        self._length = length
        self.use_beta2(beta2)
        # The step at which the warm-up ended (0: not yet), the last step at which a learning rate rose, the variance at
        # the last checks, and the last learning rates.
        self.memory = torch.zeros(2 + _CHECKS + groups, dtype=torch.float64, device=HOST)
        self._sums = self.memory[2 : 2 + _CHECKS]
        self._rates = self.memory[2 + _CHECKS :]

    def use_beta2(self, beta2: float) -> None:
        """Follow the variance with this decay from now on: load_state_dict() may bring other groups."""
        self._beta2 = beta2
        self._window = window_of(beta2)
        self._every = _steps_between_checks(beta2)

    @property
    def ended_at(self) -> int:
        """The last step of the warm-up; 0 while it lasts."""
        return int(self.memory[0])

    def over(self, step: int, variance: float, rates: Sequence[float]) -> bool:
        """Whether the warm-up ends with this step.

        Args:
            step: its number.
            variance: the sum of all variances after it.
            rates: the learning rates of the groups in this step.
        """
        now = torch.tensor(rates, dtype=torch.float64, device=HOST)
        if step > 1 and bool((now > self._rates).any()):
            self.memory[1] = step
        self._rates.copy_(now)
        # A schedule may rise only once per epoch, so it counts as rising for a whole window after a rise.
        rises = int(self.memory[1]) > 0 and step - int(self.memory[1]) < self._window
        settled = self._settled(step, variance) and not rises
        ends = step >= self._length if isinstance(self._length, int) else settled
        if ends:
            self.memory[0] = step
            _LOG.info("the warm-up ended with step %d; from now on, workers exchange signs", step)
        return ends

    def _settled(self, step: int, variance: float) -> bool:
        if step % self._every:
            return False
        check_number = step // self._every
        before = float(self._sums[check_number % _CHECKS])  # written one window ago
        # Bias-corrected: the bias alone makes the variance grow in the first windows.
        now = variance / (1.0 - self._beta2**step)
        self._sums[check_number % _CHECKS] = now
        return check_number > _CHECKS and before > 0 and now >= STABLE * before


@dataclass(frozen=True)
class StageOptions:
    """The arguments of an optimizer that decide when and how the compressed stage follows the warm-up.

    Raises:
        ValueError: naming the argument.
    """

    warmup_steps: Length
    variance_floor: float
    error_dtype: torch.dtype
    warmup_bits: int | None
    scale_block: int | None

    def __post_init__(self) -> None:
        check_error_dtype(self.error_dtype)
        check_floor(self.variance_floor)
        check_warmup_bits(self.warmup_bits)
        check_scale_block(self.scale_block)

    def settings(self) -> dict[str, Any]:
        """See `UpdateRule`."""
        return {
            "warmup_steps": self.warmup_steps,
            "warmup_bits": self.warmup_bits,
            "variance_floor": self.variance_floor,
            "error_dtype": str(self.error_dtype),
            **({} if self.scale_block is None else {"scale_block": self.scale_block}),
        }


class DenseThenSigns:
    """Averages gradients, dense or quantised, until the warm-up ends, and sends momenta as scaled signs afterwards.

    All memory is allocated at the start. The residuals of a stage are not written in the other one, and those of the
    warm-up are released with its packets at the switch, so both stages together need no more physical memory than the
    larger one.

    Args:
        context: the run.
        state: where everything that must be saved is registered.
        adam: the moments. The second stage freezes the variance and uses the memory of the momentum for residuals.
        options: when and how the stages change.
        keep_previous_answer: whether the rule needs the momentum of the previous step as well.
    """

    def __init__(
        self,
        context: Context,
        state: State,
        adam: AdamMoments,
        options: StageOptions,
        *,
        keep_previous_answer: bool = False,
    ) -> None:
        self._context = context
        self._adam = adam
        self._options = options
        self._warmup = Warmup(options.warmup_steps, largest_beta2(context.groups), len(context.groups))
        state.common["warmup"] = self._warmup.memory
        state.checks["warmup"] = steps_then_numbers(2, freezes=context.topology.compresses)
        self.mean = MeanGradient(context, state, options.warmup_bits, options.error_dtype)
        self.compressors: dict[str, Compressor] = {DENSE: self.mean.compressor}
        if context.topology.compresses:
            # The dense momentum is not needed after the switch, so the residual uses its memory.
            memory = adam.m.view(options.error_dtype)[: context.layout.own_size]
            self.signs = ScaledSign(
                context.layout,
                context.topology.node,
                context.kernels,
                options.error_dtype,
                memory,
                keep_previous=keep_previous_answer,
                scale_block=options.scale_block,
            )
            state.include(self.signs.state())
            state.differing.append("m")
            self.compressors[SIGNS] = self.signs

    @property
    def compressing(self) -> bool:
        """Whether the step under way is in the second stage."""
        return self._context.session.uses(SIGNS)

    def progress(self) -> dict[str, Any]:
        """See `UpdateRule`."""
        return {"the last step of the warm-up": self._warmup.ended_at or "none yet"}

    def channel(self) -> str:
        """See `UpdateRule`."""
        return SIGNS if self._warmup.ended_at else DENSE

    def begin_step(self) -> None:
        """See `UpdateRule`."""
        self._warmup.use_beta2(largest_beta2(self._context.groups))
        if self._warmup.ended_at:
            self.mean.release()

    def encode(self, part: Part, grad: Tensor | None, group: Group, scale: Scale) -> bool | None:
        """Send the gradient times `scale`, or, in the second stage, the momentum updated with it."""
        if not self.compressing:
            return self.mean.encode(part, grad, scale)
        beta = group["betas"][0]
        return self.signs.encode(part, grad, beta=beta, weight=1.0 - beta, scale=scale)

    def settle(self) -> None:
        """Read the answers from the packets."""
        if self.compressing:
            self.signs.read_answers()

    def apply_signs(self, part: Part, x: Tensor, low: Tensor | None, *, rate: float, decay: float) -> None:
        """Move a parameter by the momentum in the answer and the frozen variance."""
        self._context.kernels.sign_apply(
            part.down_runs,
            x,
            low,
            self._adam.v,
            self.signs.answer,
            self.signs.answer_scales,
            rate=rate,
            decay=decay,
            anchor=None,
            m=None,
            momentum=0.0,
        )

    def end_step(self, weigh: Callable[[], list[float]]) -> None:
        """Switch to the second stage if the warm-up ends with this step.

        Args:
            weigh: called at the switch, before the variance is frozen. It returns the weight of each parameter's
                momentum in packets.
        """
        if not self._context.topology.compresses or self.compressing:
            return
        rates = [float(group["lr"]) for group in self._context.groups]
        if self._warmup.over(self._context.step, math.fsum(self._adam.variances.now), rates):
            # Released before the residuals are written, to limit the peak of memory.
            self.mean.release()
            weights = weigh()
            groups = map(self._context.group_of, range(len(weights)))
            factors = [group["betas"][0] * weight for group, weight in zip(groups, weights, strict=True)]
            self.signs.start_from(self._adam.m, factors)
            self._adam.freeze_variance(self._adam.updates.now, self._options.variance_floor)

    def before_save(self, saved: dict[str, Any]) -> None:
        """Copy residuals whose dtype differs from that of their storage, because torch.save rejects these."""
        if self._context.topology.compresses and self._options.error_dtype != self._adam.m.dtype:
            states = saved["state"].items()
            saved["state"] = {index: {**state, "sent": state["sent"].clone()} for index, state in states}

    def portable(
        self, state: State, encode: Callable[[int, Part, Tensor | None, Group, Scale], bool | None], *, private: bool
    ) -> State:
        """See `UpdateRule`.

        Args:
            state: the whole state.
            encode: the rule's `encode`.
            private: whether to include what each worker keeps for itself.
        """
        # The momentum and the residual share memory, and only one of them is valid. Answers depend on the shards.
        portable = State(whole=dict(state.whole), layers=state.layers, common=state.common)
        if not self.compressing:
            if private:
                portable.include(self.mean.residuals())
            return portable
        del portable.whole["m"]
        signs = self.signs
        if not private:
            signs.sent.zero_()
            signs.sent_scales.zero_()
        # Without a gradient, a worker would send its residual plus β1 times the shared momentum.
        for position, parts in enumerate(self._context.session.channel.buffers.parts):
            for part in parts:
                encode(position, part, None, self._context.group_of(position), 1.0)
        signs.sent_scales.zero_()  # these values have not been sent
        signs.scale_residuals([1.0] * len(self._context.params))
        return replace(portable, own={"sent": signs.sent}, owned={"answered": signs.answered} if private else {})


def largest_beta2(groups: Sequence[Group]) -> float:
    """The slowest decay of the variance among all groups."""
    return max((group["betas"][1] for group in groups), default=0.0)

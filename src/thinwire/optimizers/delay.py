"""One step of delay: the answer of a step is applied in the next one, so that an exchange has a whole step to itself.

Without a delay, `step()` waits for the exchange that backward has begun. With `delay=1` it does not. It applies the
answer of the step before, and the exchange continues while the next forward runs::

    x_{t+1} = x_t - update(answer of step t-1, learning rate and weight decay of step t)

* LAMB's trust ratio is computed when an answer is applied, from the parameters of that moment.
* The first step applies nothing. Neither does the step after one that all ranks skip because a gradient was not finite.
* A parameter moves in step t if some worker had a gradient for it in step t-1.
* What workers and owners keep (averages, residuals, the activation map) is as without a delay, for the same gradients.
  So are clipping, gradient accumulation and the bytes on the wire.
* The exchange of step t is waited for when the first gradient of step t+1 is to be encoded, or by `state_dict()`,
  `synchronize()` or `load_state_dict()`. There is never more than one exchange under way, and it needs no second set of
  packets. Its answer is then part of the state: in packed form (`thinwire.compressors.kept_answers`), unless the
  rule keeps what an answer changes in any case (the momentum of 1-bit Adam and LAMB, g̃ of CD-Adam).
* The commit round takes place in the background as soon as `step()` has returned on all ranks. It compares the numbers
  of parameter groups, so ranks whose learning rates differ find out one step later than without a delay. They have
  applied an answer with them by then, but cannot save: `state_dict()` raises the error.
* A GradScaler learns of an overflow one step later, on all ranks together. The gradients of that step were still
  multiplied by the old scale, so it may be lowered twice.

Y. Li, M. Yu, S. Li, S. Avestimehr, N. S. Kim, A. Schwing: "Pipe-SGD: A Decentralized Pipelined SGD Framework for
Distributed Deep Net Training", NeurIPS 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire._checks import is_integer
from thinwire.compressors.kept_answers import NAME
from thinwire.transport.memory import HOST
from thinwire.transport.state import State

OUTCOME, PRESENT = f"{NAME}_outcome", f"{NAME}_present"
"""The names of its state."""
_NOTHING, _ANSWER, _SKIPPED = range(3)


class Delay:
    """What is known about the exchange of the last step, and about its answer.

    Args:
        steps: the argument `delay`.
        obstacle: why the update rule cannot apply answers later, if so.

    Raises:
        ValueError: if `steps` is neither 0 nor 1, or the rule cannot be delayed.
    """

    def __init__(self, steps: int, obstacle: str | None) -> None:
        if not is_integer(steps, 0, 1):
            raise ValueError(
                f"delay={steps!r}: expected 0, or 1 to apply the answer of each step in the next one. With more, "
                "updates get older and nothing is gained: exchanges that take longer than a step limit the speed anyway"
            )
        if steps and obstacle is not None:
            raise ValueError(f"delay={steps}: expected 0 here: {obstacle}")
        self.steps = steps
        self.in_flight = False
        """Whether the exchange of the last step has not been waited for."""

    def bind(self, parameters: int) -> State:
        """Allocate what must be saved, for so many parameters."""
        self._outcome = torch.zeros(1, dtype=torch.int64, device=HOST)
        self._present = torch.zeros(parameters, dtype=torch.int64, device=HOST)
        if not self.steps:
            return State()
        return State(
            common={OUTCOME: self._outcome},
            layers={PRESENT: self._present},
            checks={OUTCOME: _up_to(_SKIPPED), PRESENT: _up_to(1)},
        )

    def settings(self) -> dict[str, Any]:
        """The argument, on which all ranks must agree, if it is not the default."""
        return {"delay": self.steps} if self.steps else {}

    @property
    def pending(self) -> bool:
        """Whether an answer was not applied yet, known or not."""
        return self.in_flight or int(self._outcome) == _ANSWER

    def keep(self, present: Sequence[int], *, skipped: bool) -> None:
        """Note the outcome of an exchange: the positions of the parameters that had a gradient on some worker, and
        whether one of these gradients was not finite, so that there is no answer to apply."""
        self._outcome.fill_(_SKIPPED if skipped else _ANSWER)
        self._present.zero_()[list(present)] = 1

    def take(self) -> tuple[bool, list[int]]:
        """What `keep` has noted: whether the answer is skipped, and the positions. It is then no longer kept."""
        outcome = int(self._outcome)
        self._outcome.zero_()
        return outcome == _SKIPPED, self._present.nonzero().view(-1).tolist() if outcome else []


def _up_to(most: int) -> Any:
    def check(tensor: Tensor, step: int) -> str | None:
        fine = all(0 <= value <= most for value in tensor.flatten().tolist())
        return None if fine else f"has values beyond 0 to {most}"

    return check


def without_answer(state: State) -> State:
    """A state without a kept answer, which is that of one number of workers."""
    kinds = {
        name: {key: value for key, value in tensors.items() if not key.startswith(NAME)}
        for name, tensors in vars(state).items()
        if isinstance(tensors, dict)
    }
    return State(**kinds, differing=state.differing, numbers=state.numbers)

"""The averager of a fragment: it exchanges how far the parameters have moved, in place of gradients."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from thinwire.averaging.averager import GradientAverager
from thinwire.averaging.rule import AveragingRule
from thinwire.optimizers.optimizer import Unpack, WireOptions
from thinwire.optimizers.safety import SkipWords

_OF_UPDATES = SkipWords(
    "outer step %d: an update was not finite, so all ranks return to the parameters before it",
    "in {count} outer steps in a row, up to outer step {step}, the update of some rank was not finite {limit}. The "
    "model no longer changes",
)


class OuterAverager(GradientAverager):
    """Averages the updates of a fragment. Its parameters are the reference values, which are equal on all ranks, so
    that the comparisons of replicas compare those.

    Args:
        references: the reference values of the fragment.
        rule: averages the updates.
        wire: see `GradientAverager`.
    """

    _skip_words = _OF_UPDATES

    def __init__(self, references: Sequence[Tensor], rule: AveragingRule, **wire: Unpack[WireOptions]) -> None:
        super().__init__(references, rule, **wire)

    @property
    def _title(self) -> str:
        return "thinwire.LocalSteps"

    @property
    def _noun(self) -> str:
        return "LocalSteps"

    @property
    def _exchange_time(self) -> str:
        return "during an outer exchange"

    def take_residual(self, reference: Tensor, into: Tensor) -> None:
        """Subtract from `into` what the last message of this rank has left out of an update, and forget it."""
        if self.keeps_residual:
            into.sub_(self._residual_of(reference))
            self.forget_residual(reference)

    def forget_residual(self, reference: Tensor) -> None:
        """Forget what messages have left out of the updates of a parameter."""
        if self.keeps_residual:
            self._residual_of(reference).zero_()

    @property
    def keeps_residual(self) -> bool:
        """Whether messages of this rank leave anything out: not if it is the only one, and nothing leaves it."""
        return "residual" in self._flat_state.own

    def _residual_of(self, reference: Tensor) -> Tensor:
        layout = self._session.layout
        slot = layout.slots[self.position_of(reference)]
        return layout.own_view(self._flat_state.own["residual"], slot, reference)

    def continue_from(self, exchanges: int) -> None:
        """Count the exchanges of averagers that this one replaces, before its first. All ranks have the same number."""
        self._step_count.fill_(exchanges)
        self._begin_step()

    def agree_on(self, **numbers: float) -> None:
        """Let ranks compare numbers in the exchange that begins, before any of them applies its answer."""
        self.param_groups[0].update(numbers)

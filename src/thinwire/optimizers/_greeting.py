"""A first step that is preceded by hellos: with one bit a coordinate nobody knows at first who has anything to say."""

from __future__ import annotations

import abc

from thinwire.optimizers._base import WireOptimizer
from thinwire.transport import packet


class Greeting(WireOptimizer):
    """Greets in the first exchange of the first step, and says what it has to say in a second one."""

    @property
    @abc.abstractmethod
    def _has_hellos(self) -> bool:
        """Whether bits of coordinates that do not live yet say hello."""

    def _greets(self) -> bool:
        """Whether the step under way began with a greeting."""
        return self._step_number == 1 and self._has_hellos

    def _first_flags(self) -> int:
        return packet.ACTIVATION if self._greets() else 0

    def _exchange_after_greeting(self) -> int:
        """The second exchange; the flags seen."""
        self._flags_sent &= ~packet.ACTIVATION
        return self._exchange_again(self._channel_now())

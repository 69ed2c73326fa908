"""Where the demo's workers run: on hosts with slow links, or where that is not possible, on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from thinwire.cli import units
from thinwire.testbed import Testbed, TestbedUnavailable, parse_rate


@dataclass(frozen=True)
class Network:
    """The links between workers, and whether they are real, emulated or only predicted."""

    rate: str
    """Of each worker's link, as it was asked for: "100mbit", or "unlimited" for loopback."""
    unavailable: str | None = None
    """Why there are no emulated links of that rate; None if there are, or if none were asked for."""

    @property
    def is_loopback(self) -> bool:
        """Whether loopback was asked for."""
        return parse_rate(self.rate) is None

    @property
    def is_emulated(self) -> bool:
        """Whether each worker is on a host of its own, with a link of that rate."""
        return not self.is_loopback and self.unavailable is None

    @property
    def is_predicted(self) -> bool:
        """Whether times are predicted for links of that rate, because there are none."""
        return self.unavailable is not None

    @property
    def rate_name(self) -> str:
        """The rate as people write it."""
        return "loopback" if self.is_loopback else units.rate(self.rate)

    @property
    def predicted_bits_per_second(self) -> float | None:
        """The rate to predict times for; None where times are measured."""
        return parse_rate(self.rate) if self.is_predicted else None


@contextmanager
def opened(ranks: int, rate: str) -> Iterator[tuple[Network, Testbed | None]]:
    """As many hosts as ranks, each with a link of this rate; or None where workers have to use loopback.

    Raises:
        ValueError: for more hosts than a testbed takes.
    """
    if parse_rate(rate) is None:
        yield Network(rate), None
        return
    network, testbed = Network(rate), Testbed(ranks, rate=rate)
    with ExitStack() as stack:
        try:
            stack.enter_context(testbed)
        except TestbedUnavailable as error:
            network, testbed = Network(rate, str(error)), None
        yield network, testbed

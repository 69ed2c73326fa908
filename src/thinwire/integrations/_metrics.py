"""Metrics for the logs of a framework."""

from __future__ import annotations

from thinwire.averaging.handle import Compression
from thinwire.optimizers.optimizer import WireOptimizer


class MetricsLog:
    """Reads metrics by the names under which frameworks log them, with rates since the last reading.

    Args:
        source: has the metrics.
    """

    def __init__(self, source: WireOptimizer | Compression) -> None:
        self._source = source
        self._earlier = source.metrics()

    def read(self) -> dict[str, float]:
        """`thinwire/bytes_sent` and all others of `thinwire.Metrics.as_dict`."""
        now = self._source.metrics()
        numbers = now.as_dict(since=self._earlier)
        self._earlier = now
        return {f"thinwire/{name}": float(number) for name, number in numbers.items()}

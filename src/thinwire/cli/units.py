"""Bytes and rates as text, for all commands."""

from __future__ import annotations

from thinwire.testbed import parse_rate


def byte_count(count: float) -> str:
    """With three digits, in B to GB."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def rate(value: str) -> str:
    """A rate in tc's words as people write it."""
    bits_per_second = parse_rate(value)
    if bits_per_second is None:
        return "unlimited"
    for size, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits_per_second >= size:
            return f"{bits_per_second / size:g} {unit}"
    return f"{bits_per_second:g} bit/s"

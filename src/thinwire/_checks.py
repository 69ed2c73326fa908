"""What arguments are checked for in more than one place."""

from __future__ import annotations


def is_integer(value: object, low: int, high: int) -> bool:
    """Whether a value is an integer from `low` to `high`, and not a bool, which Python takes for one."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


MANY = 2**63 - 1
"""More than anybody counts to."""

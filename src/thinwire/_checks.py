"""Argument checks that several modules share."""

from __future__ import annotations

import math
from typing import TypeGuard

INT64_MAX = 2**63 - 1
"""The largest int64: an upper bound for counts that end up in tensors and files."""


def is_integer(value: object, low: int, high: int) -> bool:
    """Whether a value is an integer from `low` to `high`. A bool is not accepted, although it is an int in Python."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is an int or a float, and finite. A bool is not accepted."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_seed(seed: int) -> None:
    """Reject a seed that is not an integer in [0, 2**63).

    Raises:
        ValueError: naming the argument.
    """
    if not is_integer(seed, 0, INT64_MAX):
        raise ValueError(f"seed={seed!r}: expected an integer in [0, 2**63)")


def check_fraction(name: str, value: float, *, below: float = math.inf, above: float = 0.0, least: bool = True) -> None:
    """Reject a number that is out of range.

    Raises:
        ValueError: naming the argument, its value, and the range.
    """
    fine = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not fine or not above <= value < below or (value == above and not least):
        opening = "[" if least else "("
        wanted = f"in {opening}{above:g}, {below:g})" if below < math.inf else f"{'>=' if least else '>'} {above:g}"
        raise ValueError(f"{name}={value!r}: expected a number {wanted}")

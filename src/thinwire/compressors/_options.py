"""Checks of options that several schemes share."""

from __future__ import annotations


def check_flag(name: str, value: object) -> None:
    """Reject an option that is not a bool.

    Raises:
        ValueError: naming the option.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: expected True or False")

"""Rows of Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence


def row(cells: Sequence[str]) -> str:
    """A row."""
    return "| " + " | ".join(cells) + " |"


def heading(cells: Sequence[str], first: str = "---") -> list[str]:
    """The first two rows of a table whose columns are aligned to the right, but for the first one."""
    return [row(cells), row([first] + ["---:"] * (len(cells) - 1))]

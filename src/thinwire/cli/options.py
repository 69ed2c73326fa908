"""Options that several commands have, with messages that say what was given."""

from __future__ import annotations

import os
from collections.abc import Collection
from enum import Enum
from pathlib import Path
from typing import Any

import typer


class Downlink(str, Enum):
    """What a shard's owner answers: one worker's bit, what most say, or the vote count."""

    bit = "bit"
    majority = "majority"
    votes = "votes"


def downlink_of(optimizer: str, downlink: Downlink | None) -> str | None:
    """The downlink that was asked for, if any.

    Raises:
        typer.BadParameter: for a downlink of an optimizer that does not vote.
    """
    if downlink is None:
        return None
    if optimizer != "birder":
        raise typer.BadParameter(
            f"only birder votes: {optimizer} has no downlink to choose, but got {downlink.value!r}",
            param_hint="'--downlink'",
        )
    return downlink.value


def optimizer_name(known: Collection[str], description: str) -> Any:
    """One of the names in `known`."""

    def check(name: str) -> str:
        if name not in known:
            raise typer.BadParameter(f"unknown optimizer {name!r}; there are: {', '.join(known)}")
        return name

    return typer.Option(callback=check, help=f"{description}: {', '.join(known)}.")


def integer(minimum: int, description: str, panel: str | None = None) -> Any:
    """A whole number, at least `minimum`; or None, where that is the default."""

    # typer's own `min=` does not say in every version what was given.
    def check(value: int | None) -> int | None:
        if value is not None and value < minimum:
            raise typer.BadParameter(f"must be at least {minimum}, got {value}")
        return value

    return typer.Option(callback=check, help=description, rich_help_panel=panel)


def output_file(description: str) -> Any:
    """A file to write, checked before the work and not after it."""

    def check(path: Path | None) -> Path | None:
        if path is not None and not os.access(path.parent, os.W_OK):
            raise typer.BadParameter(f"cannot write {str(path)!r}: there is no writable folder {str(path.parent)!r}")
        return path

    return typer.Option(callback=check, metavar="FILE", dir_okay=False, writable=True, help=description)

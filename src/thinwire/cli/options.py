"""Options that several commands have, with messages that say what was given."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Collection
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


def optimizer_name(
    known: Collection[str], description: str, *, kind: str = "optimizer", default: str | None = None
) -> Any:
    """One of the names in `known`; or None, for which help shows `default`."""

    def check(name: str | None) -> str | None:
        if name is not None and name not in known:
            raise typer.BadParameter(f"unknown {kind} {name!r}; there are: {', '.join(known)}")
        return name

    return typer.Option(callback=check, help=f"{description}: {', '.join(known)}.", show_default=default or True)


def checked_by(refuse: Callable[[Any], object], description: str, *, show_default: str | bool = True) -> Any:
    """Anything for which `refuse` raises no ValueError, or None."""

    def check(value: Any) -> Any:
        try:
            if value is not None:
                refuse(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        return value

    return typer.Option(callback=check, help=description, show_default=show_default)


MOST_RANKS = 256
MOST_STEPS = 10**9
LARGEST_SEED = 2**63 - 1


def integer(
    minimum: int,
    description: str,
    panel: str | None = None,
    *,
    maximum: int = MOST_STEPS,
    show_default: str | bool = True,
) -> Any:
    """A whole number, from `minimum` to `maximum`; or None, where that is the default."""

    # typer's own `min=` does not say in every version what was given.
    def check(value: int | None) -> int | None:
        if value is not None and value < minimum:
            raise typer.BadParameter(f"must be at least {minimum}, got {value}")
        if value is not None and value > maximum:
            raise typer.BadParameter(f"must be at most {maximum}, got {value}")
        return value

    return typer.Option(callback=check, help=description, rich_help_panel=panel, show_default=show_default)


def number(minimum: float, maximum: float, description: str, *, show_default: str | bool = True) -> Any:
    """A number, from `minimum` to `maximum`; or None, where that is the default."""

    # typer's own `min=` lets NaN pass, which is neither above nor below anything.
    def check(value: float | None) -> float | None:
        if value is not None and not minimum <= value <= maximum:
            raise typer.BadParameter(f"must be a number from {minimum:g} to {maximum:g}, got {value}")
        return value

    return typer.Option(callback=check, help=description, show_default=show_default)


def check_elements(elements: int, processes: int) -> None:
    """Refuse vectors that do not fit into the memory of this machine, before anything is started.

    Raises:
        typer.BadParameter: if parameters and gradients alone, in fp32, need more than there is.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = memory // (processes * 2 * 4)
    if elements > room:
        raise typer.BadParameter(
            f"must be at most {room:,} for {processes} ranks and {memory / 1e9:.1f} GB of memory, got {elements:,}",
            param_hint="'--elements'",
        )


def output_file(description: str) -> Any:
    """A file to write, checked before the work and not after it."""

    def check(path: Path | None) -> Path | None:
        if path is None:
            return None
        try:
            if not path.parent.is_dir():
                raise typer.BadParameter(
                    f"cannot write {str(path)!r}: there is no writable folder {str(path.parent)!r}"
                )
            _try_to_write(path)
        except OSError as error:
            raise typer.BadParameter(f"cannot write {str(path)!r}: {error.strerror}") from None
        return path

    return typer.Option(callback=check, metavar="FILE", dir_okay=False, writable=True, help=description)


def _try_to_write(path: Path) -> None:
    """Open the file, and leave it as it was.

    Permissions do not tell: root has them everywhere, and can still write nothing to /proc or to a read-only disk.
    """
    if path.is_file():
        path.open("r+b").close()
    elif not path.exists():  # pipes and devices are left alone: opening one may wait for its reader
        path.open("xb").close()
        path.unlink()


def check_folder(path: Path, option: str, *, create: bool) -> None:
    """Refuse a folder to which nothing can be written, before the work and not after it.

    Args:
        path: the folder.
        option: that has named it.
        create: whether to make the folder if it is missing.

    Raises:
        typer.BadParameter: naming the folder and what is wrong with it.
    """
    try:
        if create:
            path.mkdir(parents=True, exist_ok=True)
        exists = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not exists.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if path.exists():
            tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise typer.BadParameter(
            f"cannot write to the folder {str(path)!r}: {error.strerror}", param_hint=f"'{option}'"
        ) from None

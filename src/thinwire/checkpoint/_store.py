"""The directory of checkpoints: their names and order, how a new one appears in it at once, and how old ones go.

000017-step-1200/       a checkpoint: a number that orders them, then the step
.5f1c0a….tmp/           one that is being written, or was when its writer crashed
.93be77….trash/         one that is being removed
.lock                   see `_lock`
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from thinwire.checkpoint._files import sync_directory
from thinwire.checkpoint._manifest import rank_file

_NAME = re.compile(r"([0-9]{6,})-step-([0-9]+)")
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.(tmp|trash)")


@dataclass(frozen=True, order=True)
class Name:
    """The name of a checkpoint. Its number decides which is newer: a run may go back to an earlier step."""

    sequence: int
    step: int

    def __str__(self) -> str:
        return f"{self.sequence:06d}-step-{self.step}"


def draw_token() -> str:
    """A part of a temporary name that nobody can foresee."""
    return secrets.token_hex(8)


class Store:
    """A directory of checkpoints, as one rank sees it: on a file system that ranks share, or on its machine's own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[Name]:
        """The checkpoints that are there, oldest first; none if the directory does not exist."""
        try:
            with os.scandir(self.path) as entries:
                found = [(entry.name, _NAME.fullmatch(entry.name)) for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            return []
        names = [(text, Name(int(match[1]), int(match[2]))) for text, match in found if match is not None]
        return sorted(name for text, name in names if str(name) == text)

    def temporary(self, token: str) -> Path:
        """Where a checkpoint is written."""
        return self.path / f".{token}.tmp"

    def final(self, name: Name) -> Path:
        """Where it is found."""
        return self.path / str(name)

    def leads(self, token: str, rank: int) -> bool:
        """Whether no lower rank has written into the same directory; asked when all have."""
        # By name, not by listing: network file systems may list a directory as it was a while ago.
        temporary = self.temporary(token)
        return not any((temporary / rank_file(lower)).exists() for lower in range(rank))

    def publish(self, token: str, name: Name) -> None:
        """Give a checkpoint that is complete and on the disk its final name."""
        os.rename(self.temporary(token), self.final(name))
        sync_directory(self.path)

    def discard(self, names: Collection[Name]) -> None:
        """Rename checkpoints to what `sweep` removes, so that none is ever seen half removed."""
        for name in names:
            os.rename(self.final(name), self.path / f".{draw_token()}.trash")
        if names:
            sync_directory(self.path)

    def sweep(self, *, besides: str | None = None, ignore_errors: bool = False) -> None:
        """Remove what crashed writers have left, and what was discarded."""
        kept = None if besides is None else self.temporary(besides)
        with os.scandir(self.path) as entries:
            leftovers = [Path(entry.path) for entry in entries if _TEMPORARY.fullmatch(entry.name)]
        for leftover in leftovers:
            if leftover != kept:
                shutil.rmtree(leftover, ignore_errors=ignore_errors)

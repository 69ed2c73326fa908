"""The directory of checkpoints: their names and order, and how they are published and removed atomically.

000017-step-1200/       a checkpoint: a sequence number, then the step
.5f1c0a….tmp/           a checkpoint that is being written, or that a crash left incomplete
.93be77….trash/         a checkpoint that is being removed
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
class CheckpointName:
    """The name of a checkpoint. The sequence number gives the order, because a run may go back to an earlier step."""

    sequence: int
    step: int

    def __str__(self) -> str:
        return f"{self.sequence:06d}-step-{self.step}"


def random_token() -> str:
    """An unpredictable part for a temporary name."""
    return secrets.token_hex(8)


class CheckpointDirectory:
    """A directory of checkpoints, as one rank sees it: on a shared file system, or on a local disk of its machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[CheckpointName]:
        """The checkpoints in the directory, oldest first; none if it does not exist."""
        try:
            with os.scandir(self.path) as entries:
                found = [(entry.name, _NAME.fullmatch(entry.name)) for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            return []
        names = [(text, CheckpointName(int(match[1]), int(match[2]))) for text, match in found if match is not None]
        return sorted(name for text, name in names if str(name) == text)

    def temporary(self, token: str) -> Path:
        """The directory in which a checkpoint is written."""
        return self.path / f".{token}.tmp"

    def final(self, name: CheckpointName) -> Path:
        """The directory of a complete checkpoint."""
        return self.path / str(name)

    def is_lowest_rank(self, token: str, rank: int) -> bool:
        """Whether no lower rank has written into the same directory. Call it when all ranks have written."""
        # Look files up by name: a listing by a network file system may be out of date.
        temporary = self.temporary(token)
        return not any((temporary / rank_file(lower)).exists() for lower in range(rank))

    def publish(self, token: str, name: CheckpointName) -> None:
        """Rename a temporary directory, whose files are complete and on the disk, to the final name."""
        os.rename(self.temporary(token), self.final(name))
        sync_directory(self.path)

    def discard(self, names: Collection[CheckpointName]) -> None:
        """Rename checkpoints for `sweep` to remove, so that no reader sees one that is partly removed."""
        for name in names:
            os.rename(self.final(name), self.path / f".{random_token()}.trash")
        if names:
            sync_directory(self.path)

    def sweep(self, *, exclude: str | None = None, ignore_errors: bool = False) -> None:
        """Remove incomplete and discarded checkpoints, except for the temporary directory of the token `exclude`."""
        kept = None if exclude is None else self.temporary(exclude)
        with os.scandir(self.path) as entries:
            leftovers = [Path(entry.path) for entry in entries if _TEMPORARY.fullmatch(entry.name)]
        for leftover in leftovers:
            if leftover != kept:
                shutil.rmtree(leftover, ignore_errors=ignore_errors)

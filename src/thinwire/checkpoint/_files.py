"""Files that are known by their digests: written so that they stay, read only if they are what was written."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from thinwire.checkpoint._manifest import Entry
from thinwire.errors import CorruptCheckpoint

_BLOCK = 1 << 20
_LARGEST_TEXT = 1 << 26
"""More than the manifest of any cluster."""


class _Digesting:
    """A file for torch.save to write to, which keeps account of what goes into it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._size = 0
        self.error: OSError | None = None
        """Why a write failed: torch's archive writer raises something else about it."""

    def write(self, data: bytes) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self._digest.update(data)
        self._size += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing: it is done once, at the end."""

    def entry(self) -> Entry:
        return Entry(self._size, self._digest.hexdigest())


def _write(path: Path, fill: Callable[[_Digesting], object]) -> Entry:
    with open(path, "xb") as file:
        digesting = _Digesting(file)
        try:
            fill(digesting)
        except Exception:
            if digesting.error is not None:
                raise digesting.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return digesting.entry()


def write_bytes(path: Path, contents: bytes) -> Entry:
    """Write a new file, and have it on the disk."""
    return _write(path, lambda file: file.write(contents))


def write_tensors(path: Path, contents: dict[str, Any], origin: str) -> Entry:
    """Write a new file with torch.save, have it on the disk, and see that it can be read.

    Raises:
        OSError: when it cannot be written.
        ValueError: when it holds what `torch.load(weights_only=True)` refuses; `origin` says where it may come from.
    """
    complaint = (
        f"{path.name} would not load: {origin} must hold nothing but tensors, numbers, strings, and lists, tuples and "
        "dicts of them"
    )
    try:
        entry = _write(path, lambda file: torch.save(contents, cast("IO[bytes]", file)))
    except OSError:
        raise
    except Exception as error:  # whatever an object raises that cannot be pickled
        raise ValueError(f"{complaint} ({_reason(error)})") from error
    try:
        # Tensors are mapped, not read: this looks at the pickle only.
        torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:
        raise ValueError(f"{complaint} ({_reason(error)})") from error
    return entry


def read_bytes(path: Path) -> bytes:
    """A small file.

    Raises:
        CorruptCheckpoint: when it is missing, or far too large.
    """
    with _opened(path) as file:
        contents = file.read(_LARGEST_TEXT + 1)
    if len(contents) > _LARGEST_TEXT:
        raise damaged(path, f"has more than {_LARGEST_TEXT} bytes")
    return contents


def read_tensors(path: Path, entry: Entry) -> Any:
    """What a file holds that torch.save has written.

    No code that it may hold is run, and none of it is looked at before its digest is.

    Raises:
        CorruptCheckpoint: when it is not the file that was written, or holds more than data.
    """
    with _opened(path) as file:
        _verify(file, path, entry)
        file.seek(0)
        try:
            return torch.load(file, weights_only=True, map_location="cpu")
        except Exception as error:  # there is no end to what a forged archive may lead to
            raise damaged(path, f"is refused by torch.load(weights_only=True): {_reason(error)}") from error


def _verify(file: BinaryIO, path: Path, entry: Entry) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != entry.size:
        raise damaged(path, f"has {size} bytes, {entry.size} were written")
    digest = hashlib.sha256()
    while block := file.read(_BLOCK):
        digest.update(block)
    if digest.hexdigest() != entry.sha256:
        raise damaged(path, "has been altered: its SHA-256 is not that of what was written")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        if not path.is_file():  # to open a pipe would be to wait for its other end
            raise damaged(path, "is not a file" if path.exists() else "is missing")
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise damaged(path, f"cannot be read ({error})") from error


def damaged(path: Path, reason: str) -> CorruptCheckpoint:
    """The error that says so."""
    return CorruptCheckpoint(f"{path} {reason}")


def _reason(error: Exception) -> str:
    """The line that tells, out of torch's page of advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = next((line for line in lines if "GLOBAL" in line or "WeightsUnpickler error" in line), (lines or [""])[0])
    return f"{type(error).__name__}: {telling.split(' Please use')[0]}"


def sync_directory(path: Path) -> None:
    """Have on the disk which files a directory holds, and by which names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot do this for directories, and need not.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Make a directory and those above it, unless they exist, and have them on the disk."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)  # another rank may have been faster
        sync_directory(directory.parent)

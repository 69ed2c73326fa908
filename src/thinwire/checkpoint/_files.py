"""Files with known digests: written durably, and read only if their SHA-256 is the one that was written."""

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
_LARGEST_MANIFEST = 1 << 26
"""Larger than any manifest."""


class _DigestingFile:
    """A file for torch.save that computes the size and the digest of what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._size = 0
        self.error: OSError | None = None
        """Why a write failed. torch's archive writer replaces this error with its own."""

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
        """Do nothing: `_write` flushes once, at the end."""

    def entry(self) -> Entry:
        return Entry(self._size, self._digest.hexdigest())


def _write(path: Path, fill: Callable[[_DigestingFile], object]) -> Entry:
    with open(path, "xb") as file:
        digesting = _DigestingFile(file)
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
    """Write a new file and flush it to the disk."""
    return _write(path, lambda file: file.write(contents))


def write_tensors(path: Path, contents: dict[str, Any], origin: str) -> Entry:
    """Write a new file with torch.save, flush it to the disk, and check that it can be loaded.

    Args:
        path: of the file, which does not exist.
        contents: what to write.
        origin: where objects that cannot be loaded may come from, for the error message.

    Raises:
        OSError: if it cannot be written.
        ValueError: if `torch.load(weights_only=True)` rejects the contents.
    """
    complaint = (
        f"{path.name} would not load: {origin} must hold nothing but tensors, numbers, strings, and lists, tuples and "
        "dicts of these"
    )
    try:
        entry = _write(path, lambda file: torch.save(contents, cast("IO[bytes]", file)))
    except OSError:
        raise
    except Exception as error:  # any class: an object that cannot be pickled may raise its own
        raise ValueError(f"{complaint} ({_reason(error)})") from error
    try:
        # With mmap this reads the pickle only, not the tensors.
        torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:
        raise ValueError(f"{complaint} ({_reason(error)})") from error
    return entry


def read_bytes(path: Path) -> bytes:
    """Read a manifest.

    Raises:
        CorruptCheckpoint: if it is missing or too large.
    """
    with _opened(path) as file:
        contents = file.read(_LARGEST_MANIFEST + 1)
    if len(contents) > _LARGEST_MANIFEST:
        raise damaged(path, f"has more than {_LARGEST_MANIFEST} bytes")
    return contents


def read_tensors(path: Path, entry: Entry) -> Any:
    """Read a file that torch.save has written.

    The digest is verified first. Code inside the file is never run.

    Raises:
        CorruptCheckpoint: if it is not the file that was written, or holds more than data.
    """
    with _opened(path) as file:
        _verify(file, path, entry)
        file.seek(0)
        try:
            return torch.load(file, weights_only=True, map_location="cpu")
        except Exception as error:  # any class: a forged archive can make torch.load raise almost everything
            raise damaged(path, f"is rejected by torch.load(weights_only=True): {_reason(error)}") from error


def _verify(file: BinaryIO, path: Path, entry: Entry) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != entry.size:
        raise damaged(path, f"has {size} bytes, but {entry.size} were written")
    digest = hashlib.sha256()
    while block := file.read(_BLOCK):
        digest.update(block)
    if digest.hexdigest() != entry.sha256:
        raise damaged(path, "has been altered: its SHA-256 is not the one that was written")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        if not path.is_file():  # opening a pipe would block
            raise damaged(path, "is not a file" if path.exists() else "is missing")
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise damaged(path, f"cannot be read ({error})") from error


def damaged(path: Path, reason: str) -> CorruptCheckpoint:
    """The error for a damaged file."""
    return CorruptCheckpoint(f"{path} {reason}")


def _reason(error: Exception) -> str:
    """The relevant line of a long error message of torch."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    relevant = next(
        (line for line in lines if "GLOBAL" in line or "WeightsUnpickler error" in line), (lines or [""])[0]
    )
    return f"{type(error).__name__}: {relevant.split(' Please use')[0]}"


def sync_directory(path: Path) -> None:
    """Flush the entries of a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support this for directories, and do not need it.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Make a directory and its parents, if they do not exist, and flush them to the disk."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)  # another rank may have made it
        sync_directory(directory.parent)

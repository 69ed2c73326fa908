"""One run at a time writes to a directory of checkpoints.

A run holds an OS lock (flock) on the file `.lock` of the directory, from its first `save` until its optimizer is
closed or collected, or its process ends. The file alone does not lock anything.

Of the ranks that share a directory, the first one to try gets the lock. It writes the token of the checkpoint into the
file. The other ranks read the file and compare the token with that of their own run. If every machine has its own
directory, one process of each machine holds a lock.

A process that saves with several optimizers holds the lock once for all of them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path

from thinwire._callers import warn_user

LOCK = ".lock"
_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}
"""Errors of file systems without locks, such as Lustre mounted without `flock`, or NFS without its lock service."""
_LARGEST = 4096
"""Most bytes to read from a lock file: far more than this module writes."""

_File = tuple[int, int]
"""The device and the inode of a lock file."""


@dataclass
class _Held:
    """A lock that this process holds."""

    descriptor: int
    owners: dict[int, weakref.finalize[..., object]] = field(default_factory=dict)
    """The objects that it is held for, by id, and the finalizers that release it when they are collected."""

    def close(self) -> None:
        """Release it."""
        for finalizer in list(self.owners.values()):
            finalizer.detach()
        os.close(self.descriptor)


_held: dict[_File, _Held] = {}
_warned: set[_File] = set()
"""The lock files for which the warning about a file system without locks was given."""
_guard = threading.RLock()
"""Reentrant, because the garbage collector may run a finalizer of this module inside it."""


class DirectoryLock:
    """One rank's part in locking a directory for one checkpoint.

    All ranks call `try_acquire`. When all have returned, all call `verify`.

    Args:
        directory: the directory of checkpoints; it exists.
        token: of the checkpoint; the same on all ranks of the run, different for every other run.
        owner: the object that the lock is held for; the lock is released when it is collected.
    """

    def __init__(self, directory: Path, token: str, owner: object) -> None:
        self._path = directory / LOCK
        self._token = token
        self._owner = owner
        self._taken: _File | None = None
        """The lock file, if this call acquired the lock for the owner."""
        self._is_settled = False
        """Whether this process holds the lock, or the file system has no locks."""

    def try_acquire(self) -> None:
        """Take the lock if it is free, and write the token into its file.

        Raises:
            OSError: when the lock file cannot be opened or written.
        """
        with _guard:
            _release_removed()
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                status = os.fstat(descriptor)
                file = (status.st_dev, status.st_ino)
                if file not in _held:
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        return  # held by another rank of this run, or by another run: see `verify`
                    except OSError as error:
                        if error.errno not in _UNSUPPORTED:
                            raise
                        self._is_settled = True
                        self._warn_unsupported(file, error)
                        return
                    _held[file] = _Held(descriptor)
                    descriptor = -1  # stays open: closing it would release the lock
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
            self._is_settled = True
            self._add_owner(file)
            self._write_token(_held[file].descriptor)

    def verify(self) -> None:
        """Check that this run holds the lock.

        Raises:
            BlockingIOError: if another run holds it.
        """
        if self._is_settled:
            return
        with open(self._path, encoding="utf-8", errors="replace") as file:
            token, _, holder = file.read(_LARGEST).partition(" ")
        if token != self._token:
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                f"path={str(self._path.parent)!r} is in use by another run ({holder.strip() or 'unknown'} holds the "
                f"lock on {LOCK}). It saves its checkpoints there and removes incomplete ones of other runs. Choose "
                "another directory, or end that run first",
            )

    def undo(self) -> None:
        """Release the lock, unless its owner held it before."""
        with _guard:
            if self._taken is not None:
                _remove_owner(self._taken, id(self._owner))
                self._taken = None

    def _add_owner(self, file: _File) -> None:
        owners = _held[file].owners
        if id(self._owner) not in owners:
            finalizer = weakref.finalize(self._owner, _remove_owner, file, id(self._owner))
            finalizer.atexit = False  # when the process ends, the lock ends with it
            owners[id(self._owner)] = finalizer
            self._taken = file

    def _write_token(self, descriptor: int) -> None:
        text = f"{self._token} process {os.getpid()} on {socket.gethostname()}\n".encode()
        os.pwrite(descriptor, text, 0)
        os.ftruncate(descriptor, len(text))
        os.fsync(descriptor)  # ranks on other machines read it from the file server

    def _warn_unsupported(self, file: _File, error: OSError) -> None:
        if file in _warned:
            return
        _warned.add(file)
        warn_user(
            f"path={str(self._path.parent)!r} is on a file system without locks ({error.strerror}): a second run that "
            "saves to the same directory is not detected, and removes what this run is writing. Give every run a "
            "directory of its own"
        )


def release(owner: int) -> None:
    """Release the locks that are held only for the object with this id."""
    with _guard:
        for file in list(_held):
            _remove_owner(file, owner)


def _remove_owner(file: _File, owner: int) -> None:
    with _guard:
        held = _held.get(file)
        if held is None or owner not in held.owners:
            return  # in a forked process, which does not hold its parent's locks
        held.owners.pop(owner).detach()
        if not held.owners:
            _held.pop(file).close()


def _release_removed() -> None:
    """Release locks whose files were removed, together with their directories."""
    removed = [file for file, held in list(_held.items()) if os.fstat(held.descriptor).st_nlink == 0]
    for file in removed:
        _held.pop(file).close()


def _close_in_child() -> None:
    """Close the locks that a forked process inherits: it would hold them after its parent has ended."""
    while _held:
        _held.popitem()[1].close()
    _guard.release()


# No thread forks while another one changes the tables.
os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_in_child)

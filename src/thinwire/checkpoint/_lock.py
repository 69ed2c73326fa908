"""One run at a time writes to a directory of checkpoints.

A run holds an OS lock (flock) on the file `.lock` of the directory, from its first `save` until its optimizer is
closed or collected or its process ends, however it ends. A lock file that is left behind locks nothing.

Of the ranks that share a directory, one process holds the lock, whichever was the fastest, and writes the token of the
checkpoint that is being saved into the file. The others cannot have the lock. They read the file, and know the token of
their own run. Where every machine has a directory of its own, one process of each machine holds a lock.

A process may save with several optimizers, one after another: it holds the lock once, for all of them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
import warnings
import weakref
from dataclasses import dataclass, field
from pathlib import Path

LOCK = ".lock"
_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}
"""What file systems without locks say. Lustre does when it is mounted without `flock`, NFS without its lock service."""
_LARGEST = 4096
"""Bytes that are read of a lock file: far more than this module writes."""

_File = tuple[int, int]
"""The device and the inode of a lock file."""


@dataclass
class _Held:
    """A lock of this process."""

    descriptor: int
    owners: dict[int, weakref.finalize[..., object]] = field(default_factory=dict)
    """By their ids, the objects that it is held for, and what happens when they are collected."""

    def close(self) -> None:
        """Release it."""
        for finalizer in list(self.owners.values()):
            finalizer.detach()
        os.close(self.descriptor)


_held: dict[_File, _Held] = {}
_told: set[_File] = set()
"""The files whose file system has no locks, and of which a warning has told."""
_guard = threading.RLock()
"""Reentrant, because an owner may be collected while a thread is in here."""


class Claim:
    """A rank's claim to write to a directory, for one checkpoint.

    All ranks `stake` their claims, and when all have, all `confirm` them.

    Args:
        directory: of the checkpoints; it exists.
        token: of the checkpoint; the same on all ranks of the run, and on no others.
        owner: the object that the lock is held for; the lock is released when it is collected.
    """

    def __init__(self, directory: Path, token: str, owner: object) -> None:
        self._path = directory / LOCK
        self._token = token
        self._owner = owner
        self._taken: _File | None = None
        """The lock that was not this owner's before."""
        self._settled = False
        """Whether this process has the lock, or nobody can have one."""

    def stake(self) -> None:
        """Take the lock if it is free, and sign it.

        Raises:
            OSError: when the lock file cannot be opened or written.
        """
        with _guard:
            _drop_removed()
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                status = os.fstat(descriptor)
                file = (status.st_dev, status.st_ino)
                if file not in _held:
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        return  # held by another rank of this run, or by another run: `confirm` finds out
                    except OSError as error:
                        if error.errno not in _UNSUPPORTED:
                            raise
                        self._settled = True
                        self._tell_unsupported(file, error)
                        return
                    _held[file] = _Held(descriptor)
                    descriptor = -1  # stays open: closing it would release the lock
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
            self._settled = True
            self._own(file)
            self._sign(_held[file].descriptor)

    def confirm(self) -> None:
        """See that the lock is held by this run.

        Raises:
            BlockingIOError: when another run has it.
        """
        if self._settled:
            return
        with open(self._path, encoding="utf-8", errors="replace") as file:
            token, _, holder = file.read(_LARGEST).partition(" ")
        if token != self._token:
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                f"path={str(self._path.parent)!r} is in use by another run ({holder.strip() or 'unknown'} holds the "
                f"lock on {LOCK}), which saves its checkpoints there and removes what it takes for leftovers. Choose "
                "another directory, or end that run first",
            )

    def withdraw(self) -> None:
        """Release the lock, unless its owner had it before."""
        with _guard:
            if self._taken is not None:
                _leave(self._taken, id(self._owner))
                self._taken = None

    def _own(self, file: _File) -> None:
        owners = _held[file].owners
        if id(self._owner) not in owners:
            finalizer = weakref.finalize(self._owner, _leave, file, id(self._owner))
            finalizer.atexit = False  # when the process ends, the lock ends with it
            owners[id(self._owner)] = finalizer
            self._taken = file

    def _sign(self, descriptor: int) -> None:
        signature = f"{self._token} process {os.getpid()} on {socket.gethostname()}\n".encode()
        os.pwrite(descriptor, signature, 0)
        os.ftruncate(descriptor, len(signature))
        os.fsync(descriptor)  # ranks on other machines read it from the server

    def _tell_unsupported(self, file: _File, error: OSError) -> None:
        if file in _told:
            return
        _told.add(file)
        warnings.warn(
            f"path={str(self._path.parent)!r} is on a file system without locks ({error.strerror}): a second run that "
            "saves to the same directory would not be refused, and would remove what this run is writing. Give every "
            "run a directory of its own",
            RuntimeWarning,
            stacklevel=7,
        )


def release(owner: int) -> None:
    """Release all locks that are held for the object with this id, and for no other."""
    with _guard:
        for file in list(_held):
            _leave(file, owner)


def _leave(file: _File, owner: int) -> None:
    with _guard:
        held = _held.get(file)
        if held is None or owner not in held.owners:
            return  # in a forked process, which has none of its parent's locks
        held.owners.pop(owner).detach()
        if not held.owners:
            _held.pop(file).close()


def _drop_removed() -> None:
    """Let go of lock files that somebody has removed together with their directories."""
    removed = [file for file, held in list(_held.items()) if os.fstat(held.descriptor).st_nlink == 0]
    for file in removed:
        _held.pop(file).close()


def _forget_in_child() -> None:
    """A forked process shares its parent's locks, and would keep them when the parent has ended."""
    while _held:
        _held.popitem()[1].close()
    _guard.release()


# Nobody forks while another thread is in the middle of a change.
os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_forget_in_child)

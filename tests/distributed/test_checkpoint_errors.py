"""What the operating system refuses is raised on every rank with its errno, so that programs can tell what it was."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
from torch import nn

import thinwire
from tests.harness import run_ranks
from thinwire import checkpoint
from thinwire.transport.failures import on_all_ranks
from thinwire.transport.peers import Peers

Told = tuple[str, int | None, str]


def save(path: Path) -> Told | None:
    """The class, errno and text of the OSError that `save` raises."""
    net = nn.Linear(40, 3)
    optimizer = thinwire.Birder(net.parameters(), lr=0.01)
    try:
        checkpoint.save(path, net, optimizer, 1)
    except OSError as error:
        return type(error).__name__, error.errno, str(error)
    return None


def save_in_trouble(rank: int, world_size: int, path: Path, trouble: str) -> Told | None:
    if rank != world_size - 1:
        return save(path / "fine")
    if trouble == "a file is in the way":
        return save(path / "file")
    if trouble == "the name is too long":
        return save(path / ("x" * 300))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limit[1]))
    try:
        return save(path / "fine")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


TROUBLES = {
    "a file is in the way": ("NotADirectoryError", errno.ENOTDIR),
    "the name is too long": ("OSError", errno.ENAMETOOLONG),
    "the disk is full": ("OSError", errno.EFBIG),
}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_errno_of_one_rank_is_raised_on_all(world_size: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    for trouble, (name, number) in TROUBLES.items():
        for told in run_ranks(save_in_trouble, world_size, tmp_path, trouble):
            assert told is not None, trouble
            assert told[:2] == (name, number), trouble
            assert os.strerror(number) in told[2]
            assert told[2].count("Errno") == 1
            assert (f"rank {world_size - 1}: " in told[2]) == (world_size > 1)


def fail_as_told(rank: int, world_size: int, errors: list[Exception | None]) -> Told | None:
    def action() -> None:
        error = errors[rank]
        if error is not None:
            raise error

    try:
        on_all_ranks(Peers.of(None), action)
    except OSError as error:
        return type(error).__name__, error.errno, str(error)
    return None


def test_the_first_rank_that_fails_decides_and_all_are_told_of() -> None:
    denied = PermissionError(errno.EACCES, "Permission denied", "/a")
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", "/b", None, "/c")
    expected = (
        "PermissionError",
        errno.EACCES,
        "[Errno 13] rank 1: Permission denied: '/a'; rank 2: [Errno 2] No such file or directory: '/b' -> '/c'",
    )
    assert run_ranks(fail_as_told, 3, [None, denied, missing]) == [expected] * 3


def test_an_error_without_a_number_stays_one() -> None:
    assert run_ranks(fail_as_told, 2, [None, OSError("no number")]) == [("OSError", None, "rank 1: no number")] * 2


def test_all_ranks_with_the_same_error_say_it_once() -> None:
    error = PermissionError(errno.EPERM, "Operation not permitted", "/a")
    expected = ("PermissionError", errno.EPERM, "[Errno 1] Operation not permitted: '/a'")
    assert run_ranks(fail_as_told, 2, [error, error]) == [expected] * 2

"""What tests of the testbed look at from outside. Other testbeds may stand on this machine at the same time."""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.testbed import Testbed, TestbedUnavailable

NAMESPACES = Path("/var/run/netns")


@functools.cache
def _reason_for_none() -> str:
    try:
        with Testbed(1):
            return ""
    except TestbedUnavailable as error:
        return str(error)


def skip_unless_available() -> None:
    """Skip the test that asks, for the reason that the testbed itself gives."""
    reason = _reason_for_none()
    if reason:
        pytest.skip(reason)


def namespaces_of(pid: int) -> list[str]:
    if not os.path.isdir(NAMESPACES):
        return []  # none has ever been made on this machine
    return [name for name in os.listdir(NAMESPACES) if name.startswith(f"thinwire-{pid}-")]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether a condition holds at some moment within so many seconds; it may not hold for long."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def read_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(count)]

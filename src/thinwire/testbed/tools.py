"""``ip`` and ``tc``: whether they can work here, and how they are called."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from thinwire.testbed.signals import signals_deferred


class TestbedUnavailable(RuntimeError):
    """This machine cannot have a testbed; the message says what is missing."""

    __test__ = False  # pytest takes every class for tests whose name begins like this


class ToolError(RuntimeError):
    """``ip`` or ``tc`` refused; the message is its own."""


def require_tools() -> None:
    """Raise `TestbedUnavailable` unless this is Linux, we are root, and ``ip`` and ``tc`` are there."""
    if sys.platform != "linux":
        raise TestbedUnavailable(f"a testbed is made of Linux network namespaces; this is {sys.platform}")
    if os.geteuid() != 0:
        raise TestbedUnavailable(
            f"a testbed needs root to make network namespaces; this process runs as user {os.geteuid()}"
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise TestbedUnavailable(
            f"a testbed needs the commands 'ip' and 'tc' (package iproute2); not on PATH: {', '.join(missing)}"
        )


def run_tool(*command: str) -> str:
    """What ``ip ...`` or ``tc ...`` prints. Raises `ToolError` where it refuses."""
    # In a session of its own: Ctrl-C in a terminal reaches the whole foreground group, and must not end `ip` halfway.
    # An exception while it is being started would leave it without anybody who waits for it, to add what was removed.
    with signals_deferred():
        finished = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True, check=False
        )
    if finished.returncode != 0:
        raise ToolError(f"`{' '.join(command)}`: {finished.stderr.strip() or f'exit code {finished.returncode}'}")
    return finished.stdout

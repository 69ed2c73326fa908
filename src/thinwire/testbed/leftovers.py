"""Owners of network namespaces, and how namespaces are removed with the processes inside."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path

from thinwire.testbed.tools import ToolError, require_tools, run_tool

NAMED_NAMESPACES = Path("/var/run/netns")  # where `ip netns` keeps them
SWITCH = "switch"
# Killed processes are gone in milliseconds; on a machine that swaps it may take longer.
_SECONDS_TO_DIE = 10.0

_serials = itertools.count()
_OWNED_NAME = re.compile(r"(?P<testbed>thinwire-(?P<pid>\d+)-(?P<start>\d+)-\d+)-(?:switch|h\d+)")


def new_testbed_name() -> str:
    """A name that contains its owner: the process id and its start time, because process ids are reused."""
    pid = os.getpid()
    return f"thinwire-{pid}-{_start_ticks(pid)}-{next(_serials)}"


def remove_leftovers() -> list[str]:
    """Remove the testbeds whose owners are gone, with the processes in them.

    Returns:
        The names of the namespaces that were removed.

    Raises:
        TestbedUnavailable: where there can be no testbeds.
    """
    require_tools()
    owners = {match["testbed"]: (int(match["pid"]), int(match["start"])) for match in _owned_names()}
    removed: list[str] = []
    for testbed, (pid, start) in owners.items():
        if _start_ticks(pid) != start:
            removed += _remove_namespaces(testbed)
    return removed


def remove_testbed(testbed: str) -> None:
    """Remove a testbed of our own, wholly: when this returns, its links are gone too."""
    # A namespace takes its links down some time after its name is gone; deleted one by one they are gone at once, and
    # the other end of a cable with them. Not for leftovers: another process that removes the same ones at the same time
    # would find this `ip` inside a namespace, and kill it.
    switch = f"{testbed}-{SWITCH}"
    try:
        for kind in ("veth", "bridge") if _is_namespace(switch) else ():
            shown = run_tool("ip", "-n", switch, "-j", "link", "show", "type", kind)
            for link in json.loads(shown or "[]"):
                run_tool("ip", "-n", switch, "link", "delete", "dev", link["ifname"])
    finally:
        _remove_namespaces(testbed)


def _remove_namespaces(testbed: str) -> list[str]:
    namespaces = [match[0] for match in _owned_names() if match["testbed"] == testbed]
    with ExitStack() as open_files:
        # As long as they are open, their inodes cannot become those of other namespaces.
        inodes = {inode for name in namespaces if (inode := _open(NAMED_NAMESPACES / name, open_files)) is not None}
        _end_processes(inodes)
        for namespace in namespaces:
            try:
                run_tool("ip", "netns", "delete", namespace)
            except ToolError:
                # If it is gone, another process was faster.
                if (NAMED_NAMESPACES / namespace).exists():
                    raise
        # Once more: a process may have been about to enter.
        survivors = _end_processes(inodes)
    if survivors:
        raise RuntimeError(f"processes {sorted(survivors)} of {testbed} did not end within {_SECONDS_TO_DIE:g} s")
    return namespaces


def _owned_names() -> list[re.Match[str]]:
    # The folder comes with the first namespace of this machine.
    names = sorted(os.listdir(NAMED_NAMESPACES)) if NAMED_NAMESPACES.is_dir() else []
    return [match for match in map(_OWNED_NAME.fullmatch, names) if match is not None]


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did; None if it does not live."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in brackets, and may hold anything, blanks and brackets included.
    fields_from_third = text.rpartition(")")[2].split()
    # A zombie has ended, whether or not its parent will ever take note.
    return None if fields_from_third[0] == "Z" else int(fields_from_third[22 - 3])


def _end_processes(inodes: set[tuple[int, int]]) -> set[int]:
    """Kill the processes in the namespaces. Returns those still there after `_SECONDS_TO_DIE`."""
    deadline = time.monotonic() + _SECONDS_TO_DIE
    while True:
        # Again and again, as some may be forking.
        inside = {pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _kill_if_inside(pid, inodes)}
        if not inside or time.monotonic() > deadline:
            return inside
        time.sleep(0.01)


def _kill_if_inside(pid: int, inodes: set[tuple[int, int]]) -> bool:
    try:
        # The descriptor stays with this process: if it ends and its id is given to another, that one is not hit.
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if _identity(f"/proc/{pid}/ns/net") not in inodes:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has ended by itself
    except PermissionError:
        return False  # not even root may look inside, so it is none that we started
    finally:
        os.close(descriptor)
    return True


def _open(path: Path, open_files: ExitStack) -> tuple[int, int] | None:
    """The inode behind a path, kept open; None if there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    open_files.callback(os.close, descriptor)
    return _identity(descriptor)


def _identity(path: str | Path | int) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _is_namespace(name: str) -> bool:
    """Whether there is a namespace behind the name: an `ip` that was killed may have left a plain file."""
    path = NAMED_NAMESPACES / name
    return path.exists() and _identity(path)[0] == _identity("/proc/self/ns/net")[0]

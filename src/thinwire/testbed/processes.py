"""The ranks: processes in the hosts' namespaces, their environment, and their end."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from thinwire.testbed.leftovers import NAMED_NAMESPACES

CLONE_NEWNET = 0x40000000
# How long a rank may take to end after SIGTERM.
GRACE_SECONDS = 3.0
_LAUNCHER = Path(__file__).with_name("launcher.py")
# What decides where and how a rank runs; a caller who wants something else does not want `start`.
_OURS = {"args", "env", "executable", "preexec_fn", "process_group", "shell", "start_new_session"}


def rank_environments(
    hosts: int, ranks: int, master_address: str, master_port: int, interface: str, extra: Mapping[str, str] | None
) -> Iterator[dict[str, str]]:
    """What torchrun would tell each process, in rank order: all of host 0, then all of host 1, and so on."""
    # If we run under torchrun ourselves, its agent's store is not the ranks' business.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    # Ranks share this machine's cores; as many threads each as there are cores would slow each other down.
    shared = {"OMP_NUM_THREADS": "1"} | inherited | dict(extra or {})
    for rank in range(hosts * ranks):
        yield shared | {
            "RANK": str(rank),
            "WORLD_SIZE": str(hosts * ranks),
            "LOCAL_RANK": str(rank % ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": str(rank // ranks),
            "MASTER_ADDR": master_address,
            "MASTER_PORT": str(master_port),
            "GLOO_SOCKET_IFNAME": interface,
        }


def check_ranks(ranks: int) -> None:
    """Refuse a number of ranks a host that cannot be."""
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")


def check_options(options: Mapping[str, object]) -> None:
    """Refuse the options of ``Popen`` that are not the caller's to choose."""
    refused = sorted(_OURS & options.keys())
    if refused:
        raise TypeError(f"start() sets {', '.join(refused)} itself; pass other options of subprocess.Popen only")


def start_in(
    namespace: str, command: Sequence[str], env: Mapping[str, str], options: Mapping[str, Any]
) -> subprocess.Popen[Any]:
    """Start a command in a namespace, as the leader of a session and process group of its own.

    It is killed when the *thread* that calls this ends, hence with the process too, however that ends.
    """
    # Isolated (-I, -S), as the launcher is ours, and the environment is meant for the command.
    launcher = (sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()))
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, *launcher, *command], env=env, start_new_session=True, **options
    )


def enter_namespace(namespace: str) -> None:
    """Move the calling thread, and those it makes from now on, to a host: for processes that a program forks itself."""
    descriptor = os.open(NAMED_NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # os.setns() came with Python 3.12.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns({namespace}): {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)


def wait_for(processes: Sequence[subprocess.Popen[Any]]) -> int:
    """Wait until all have succeeded, or one has failed. Returns 0 or its exit code, 128 + n if signal n ended it."""
    with ExitStack() as descriptors:
        running = {}
        for process in processes:
            if process.poll() is None:
                descriptor = os.pidfd_open(process.pid)
                descriptors.callback(os.close, descriptor)
                running[descriptor] = process
        ended = [process for process in processes if process.returncode is not None]
        while True:
            for process in ended:
                if process.returncode != 0:
                    return process.returncode if process.returncode > 0 else 128 - process.returncode
            if not running:
                return 0
            ended = [running.pop(descriptor) for descriptor in wait(list(running)) if isinstance(descriptor, int)]
            for process in ended:
                process.wait()


def end(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """End what still runs: SIGTERM, then SIGKILL to those that do not listen, with their process groups."""
    _signal_groups(processes, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            # Expected of some; the rest have had their time as well by now.
            break
    _signal_groups(processes, signal.SIGKILL)
    for process in processes:
        process.wait()


def _signal_groups(processes: Sequence[subprocess.Popen[Any]], number: signal.Signals) -> None:
    for process in processes:
        # Until its leader is waited for, the id of the group cannot become another's.
        if process.poll() is None:
            os.killpg(process.pid, number)

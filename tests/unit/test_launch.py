"""Local ranks: the first error is reported with its traceback, and no process is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.testbeds import eventually, is_gone, skip_unless_available
from thinwire.cli.launch import run_local_ranks
from thinwire.testbed import Testbed
from thinwire.testbed.supervisor import ChildError

Report = Callable[[Any], None]


def report_pids(report: Report) -> None:
    """Tell the parent who takes part."""
    pids = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    pids[dist.get_rank()] = os.getpid()
    dist.all_reduce(pids)
    report(pids.tolist())


def fail_on(report: Report, rank: int) -> None:
    report_pids(report)
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} does not like this")
    dist.barrier()


def die_on(report: Report, rank: int) -> None:
    report_pids(report)
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_for_ever(report: Report) -> None:
    report_pids(report)
    signal.pause()


def assert_gone(pids: list[int]) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_rank_zero_is_heard_and_all_end() -> None:
    messages: list[list[int]] = []
    run_local_ranks(report_pids, 2, (), messages.append)
    assert len(messages) == 1
    assert len(set(messages[0])) == 2
    assert_gone(messages[0])


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_arrives_with_its_traceback(rank: int) -> None:
    messages: list[list[int]] = []
    # The other fails as well, because its peer is gone; what is told is the cause.
    with pytest.raises(ChildError, match=f"rank {rank} failed:") as caught:
        run_local_ranks(fail_on, 2, (rank,), messages.append)
    assert "in fail_on" in str(caught.value)
    assert f"ValueError: rank {rank} does not like this" in str(caught.value)
    assert_gone(messages[0])


@pytest.mark.usefixtures("forked_ranks")
def test_a_worker_that_is_killed_is_named() -> None:
    messages: list[list[int]] = []
    with pytest.raises(ChildError, match="rank 1 was ended by SIGKILL"):
        run_local_ranks(die_on, 2, (1,), messages.append)
    assert_gone(messages[0])


def test_an_interrupt_leaves_no_process_behind() -> None:
    messages: list[list[int]] = []

    def interrupt(pids: list[int]) -> None:
        messages.append(pids)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_local_ranks(wait_for_ever, 2, (), interrupt)
    assert_gone(messages[0])


def interrupt_oneself(report: Report) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
    report_pids(report)


def test_workers_do_not_see_ctrl_c() -> None:
    messages: list[list[int]] = []
    run_local_ranks(interrupt_oneself, 2, (), messages.append)
    assert len(messages) == 1


def use_gloo_until_the_end(report: Report) -> None:
    report_pids(report)
    # Left under way: gloo's threads still hold these when the worker is through.
    tensors = [torch.ones(1000) for _ in range(50)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    assert len(works) == 50


def test_workers_end_while_gloo_still_works(capfd: pytest.CaptureFixture[str]) -> None:
    messages: list[list[int]] = []
    for _ in range(3):
        run_local_ranks(use_gloo_until_the_end, 2, (), messages.append)
    assert len(messages) == 3
    assert capfd.readouterr().err == ""


PARENT = """
from tests.unit.test_launch import wait_for_ever
from thinwire.cli.launch import run_local_ranks
if __name__ == "__main__":
    run_local_ranks(wait_for_ever, 2, (), lambda pids: print(*pids, flush=True))
"""


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": f"{Path.cwd()}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    assert eventually(lambda: all(map(is_gone, pids)))


@pytest.mark.usefixtures("forked_ranks")
def test_an_argument_larger_than_a_pipe_arrives() -> None:
    """A pipe holds 64 kB, so arguments travel in a file."""
    sizes: list[int] = []
    run_local_ranks(tell_size, 2, ("x" * 10_000_000,), sizes.append)
    assert sizes == [10_000_000]


def tell_size(report: Report, text: str) -> None:
    report(len(text))


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_on_the_hosts_of_a_testbed() -> None:
    skip_unless_available()
    places: list[tuple[list[str], str]] = []
    with Testbed(2) as testbed:
        run_local_ranks(tell_place, 2, (), places.append, testbed)
        assert testbed.bytes_sent()[1] > 0
        with pytest.raises(ValueError, match="ranks must be 2, one per host of the testbed, got 3"):
            run_local_ranks(tell_place, 3, (), places.append, testbed)
    assert places == [(["lo", "eth0"], "eth0")]


def tell_place(report: Report) -> None:
    dist.barrier()
    interfaces = [name for _, name in socket.if_nameindex()]
    report((sorted(interfaces, reverse=True), os.environ["GLOO_SOCKET_IFNAME"]))

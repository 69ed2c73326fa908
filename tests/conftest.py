"""What holds for all tests, and which of them may run at the same time in the processes of `make test` (pytest-xdist).

A test goes to any free process. The tests of the files below go to one process, one after another: they share
something that takes long to make, or they measure time and would disturb each other. xdist has a mark for this,
`xdist_group`, which has no effect under pytest 9.2 (pytest-dev/pytest-xdist#1386).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

# Triton reads it when it is imported, here and in the ranks that tests start: kernels for GPUs run on the CPU then.
os.environ["TRITON_INTERPRET"] = "1"

# Read by Hugging Face's packages when they are imported. No test may ask a server for anything.
os.environ["HF_HUB_OFFLINE"] = "1"

# A shell makes the commands that it starts in the background ignore SIGINT, and their child processes inherit this.
# Tests that interrupt ranks would then fail.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis allows an example 200 ms unless told otherwise. A busy machine may interrupt any of them for longer.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# For `make test`: the same examples on every run. `make test-all` draws new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)

TOGETHER = {
    "tests/unit/test_packaging.py": "two wheels",
    "tests/unit/test_step_report.py": "a browser",
    "tests/unit/test_docs.py": "a browser",
    "tests/unit/test_bench_step.py": "links as thin as they claim to be",
    "tests/unit/test_testbed.py": "links as thin as they claim to be",
    "tests/distributed/test_testbed.py": "links as thin as they claim to be",
    "tests/distributed/test_chaos.py": "links that are cut",
    "tests/distributed/test_elastic_chaos.py": "links that are cut",
    "tests/distributed/test_interrupts.py": "links that are cut",
    "tests/distributed/test_faults.py": "ranks that wait for dead ones, all at once",
    "tests/unit/test_checkpoint_directory.py": "a checkpoint",
    "tests/unit/test_checkpoint_damage.py": "a checkpoint",
    "tests/distributed/test_reshard.py": "runs whose states are saved",
    "tests/distributed/test_reshard_details.py": "runs whose states are saved",
    "tests/distributed/test_corrupt_packets.py": "ranks that live through all cases",
    "tests/distributed/test_frameworks.py": "frameworks",
    "tests/distributed/test_framework_checkpoints.py": "frameworks",
}


class Scheduling(LoadScopeScheduling):
    """The groups of `TOGETHER` first, then one test after another to any free process."""

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER.get(nodeid.partition("::")[0], nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    lost = [path for path in TOGETHER if not (config.rootpath / path).is_file()]
    if lost:
        raise pytest.UsageError(f"{__file__} names files that do not exist: {', '.join(lost)}")
    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    if fixturedef.scope == "module" and request.node.nodeid not in TOGETHER:
        pytest.fail(f"every process would make {fixturedef.argname!r}: add {request.node.nodeid} to {__file__}")


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The tensors are small. On a busy machine, torch threads that wait for each other take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

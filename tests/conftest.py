"""Which tests may run at the same time, when `make test` gives them to several processes (pytest-xdist).

A test goes to whichever process is free. Those of the files below go to one process, one after another: they share
what is dear to make, or they measure time and would disturb each other. xdist's own mark for that, `xdist_group`, is
silently without effect under pytest 9.2 (pytest-dev/pytest-xdist#1386).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

# Triton reads it when it is imported, here and in the ranks that tests start: kernels for GPUs run on the CPU then.
os.environ["TRITON_INTERPRET"] = "1"

# For `make test`: the same examples on every run. `make test-all` draws new ones.
settings.register_profile("repeatable", derandomize=True)

TOGETHER = {
    "tests/unit/test_packaging.py": "two wheels",
    "tests/unit/test_step_report.py": "a browser",
    "tests/unit/test_docs.py": "a browser",
    "tests/unit/test_bench_step.py": "links as thin as they claim to be",
    "tests/unit/test_testbed.py": "links as thin as they claim to be",
    "tests/distributed/test_testbed.py": "links as thin as they claim to be",
    "tests/distributed/test_chaos.py": "links that are cut",
    "tests/distributed/test_interrupts.py": "links that are cut",
    "tests/distributed/test_faults.py": "ranks that wait for dead ones, all at once",
    "tests/unit/test_checkpoint_store.py": "a checkpoint",
    "tests/unit/test_checkpoint_damage.py": "a checkpoint",
    "tests/distributed/test_elastic.py": "runs whose states are saved",
    "tests/distributed/test_elastic_details.py": "runs whose states are saved",
    "tests/distributed/test_corrupt_packets.py": "ranks that live through all cases",
}


class Scheduling(LoadScopeScheduling):
    """One test after another to whoever is free, and before that what belongs together."""

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER.get(nodeid.partition("::")[0], nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    lost = [path for path in TOGETHER if not (config.rootpath / path).is_file()]
    if lost:
        raise pytest.UsageError(f"{__file__} names files that are not there: {', '.join(lost)}")
    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    if fixturedef.scope == "module" and request.node.nodeid not in TOGETHER:
        pytest.fail(f"every process would make {fixturedef.argname!r}: add {request.node.nodeid} to {__file__}")

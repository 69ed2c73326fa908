"""What holds for all unit tests."""

from __future__ import annotations

from functools import partial

import pytest

from tests.harness import fork_server
from tests.unit.covering import mark_long
from thinwire.testbed.supervisor import Supervisor


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most cases of crossed parameters of kernel tests to `make test-all`."""
    mark_long(items)


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands that run in this process fork their ranks, where the start of a rank is not what is tested.

    A rank that is a new interpreter imports torch, for two to three seconds of a core.
    """
    for module in ("thinwire.cli.launch", "thinwire.cli.step.ranks"):
        monkeypatch.setattr(f"{module}.Supervisor", partial(Supervisor, fork_server()))

"""What holds for all unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.unit.covering import mark_long


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The tensors are small. Threads of torch that wait for each other on a busy machine cost ten times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most cases of crossed parameters of kernel tests to `make test-all`."""
    mark_long(items)

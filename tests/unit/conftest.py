"""What holds for all unit tests."""

from __future__ import annotations

import pytest

from tests.unit.covering import mark_long


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most cases of crossed parameters of kernel tests to `make test-all`."""
    mark_long(items)

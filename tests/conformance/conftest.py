"""Which cases of the conformance suite `make test` leaves to `make test-all`."""

from __future__ import annotations

import pytest

from tests.conformance.test_conformance import Entry, Grid


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark variants of optimizers in nodes as `long`: every variant runs flat, and every optimizer in nodes."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            entry, grid = item.callspec.params.get("entry"), item.callspec.params.get("grid")
            if isinstance(entry, Entry) and isinstance(grid, Grid) and entry.variant and grid.ranks > 1:
                item.add_marker(pytest.mark.long)

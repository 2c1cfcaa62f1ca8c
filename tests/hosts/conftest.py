"""Skips everything here where hosts cannot be made, and says why."""

from __future__ import annotations

import pytest
from hosts_kit import Net, why_not

_REASON = why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _REASON is None:
        return
    for item in items:
        if item.path.parent.name == "hosts":
            item.add_marker(pytest.mark.skip(reason=_REASON))


@pytest.fixture(scope="module")
def pair():
    """Two hosts for the tests of a module, which leave cable, limit and processes as they were."""
    with Net(2) as net:
        yield net.hosts

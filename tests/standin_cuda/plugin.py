"""pytest on the stand-in CUDA device: `pytest -p tests.standin_cuda.plugin tests/gpu`.

A test fails in which an access did not wait for another one, whatever it asserts itself. Where the stand-in cannot be
built, tests for a GPU are skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import standin_cuda

REASON = standin_cuda.unavailable()
DEVICE = None if REASON else standin_cuda.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if REASON and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"no stand-in CUDA device: {REASON}"))
        elif item.get_closest_marker("silicon"):
            item.add_marker(pytest.mark.skip(reason="only a real GPU can answer it"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if DEVICE is None:
        return (yield)
    DEVICE.violations(clear=True)
    DEVICE.reset_counters()
    result = yield
    if found := DEVICE.violations(clear=True):
        pytest.fail("\n".join(found), pytrace=False)
    return result

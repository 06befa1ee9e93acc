"""Pytest plugin of a rehearsal (``-p benchmarks.gpu.rehearsing``): every test runs with two simulated devices.

It keeps every shape in the first precision, and every precision at the reference shape. This covers all code paths of
the suites without running every combination.
"""

from collections.abc import Iterator

import pytest

from benchmarks.gpu.devices import TwoDevices, two_devices
from benchmarks.measure.shapes import PRECISIONS, REFERENCE, Shape, Workload, workload_of


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop the other combinations of precision and shape."""
    dropped = [item for item in items if _is_more_of_the_same(item)]
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=dropped)


def _is_more_of_the_same(item: pytest.Item) -> bool:
    workload = workload_of(item)
    if not isinstance(workload, Workload) or workload.precision in (PRECISIONS[0], "int32"):
        return False
    # Served batches, from one row to 256, have a different code path for each precision.
    return workload.shape not in (REFERENCE, Shape(1))


@pytest.fixture(scope="session", autouse=True)
def _two_devices() -> Iterator[TwoDevices]:
    """Wrap all fixtures and tests, so that tensors kept for the session are known to be on the GPU."""
    with two_devices() as watch:
        yield watch

"""Pytest plugin of a rehearsal (``-p benchmarks.gpu.rehearsing``): every test runs with the two devices kept apart.

Of the workloads it keeps every shape in the first precision and every precision at the reference shape: all ways that
the suites have, without their product.
"""

from collections.abc import Iterator

import pytest

from benchmarks.gpu.devices import TwoDevices, two_devices
from benchmarks.measure.shapes import PRECISIONS, REFERENCE, Shape, Workload


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop other precisions of other shapes."""
    dropped = [item for item in items if _is_more_of_the_same(item)]
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=dropped)


def _is_more_of_the_same(item: pytest.Item) -> bool:
    workload = item.callspec.params.get("workload") if hasattr(item, "callspec") else None
    if not isinstance(workload, Workload) or workload.precision in (PRECISIONS[0], "int32"):
        return False
    # Served batches, of one row to 256, multiply in another way for each precision.
    return workload.shape not in (REFERENCE, Shape(1))


@pytest.fixture(scope="session", autouse=True)
def _two_devices() -> Iterator[TwoDevices]:
    """Around all fixtures and tests, so that what a session keeps is known to be the GPU's."""
    with two_devices() as watch:
        yield watch

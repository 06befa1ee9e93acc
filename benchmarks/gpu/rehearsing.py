"""Pytest plugin of a rehearsal (``-p benchmarks.gpu.rehearsing``): every test runs with the two devices kept apart."""

from collections.abc import Iterator

import pytest

from benchmarks.gpu.devices import TwoDevices, two_devices


@pytest.fixture(scope="session", autouse=True)
def _two_devices() -> Iterator[TwoDevices]:
    """Around all fixtures and tests, so that what a session keeps is known to be the GPU's."""
    with two_devices() as watch:
        yield watch

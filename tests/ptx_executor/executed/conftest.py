"""Tests that run compiled kernels: for sessions with ``RBM_EXECUTE_PTX``, which ``test_executed.py`` starts."""

import os
from collections.abc import Iterator

import pytest

from rbm_kernels._launching import forget_prepared

collect_ignore_glob = [] if "RBM_EXECUTE_PTX" in os.environ else ["test_*.py"]


@pytest.fixture(autouse=True)
def _prepare_anew() -> Iterator[None]:
    """Discard prepared launches, since tests replace the configurations they were prepared with."""
    forget_prepared()
    yield
    forget_prepared()


@pytest.fixture
def served(device) -> Iterator[None]:
    """The operators for CPU tensors are the compiled kernels."""
    from triton_on_cpu import serving_kernels

    with serving_kernels():
        yield


@pytest.fixture(scope="session")
def architecture() -> int:
    """The architecture that the kernels are compiled for."""
    return int(os.environ["RBM_EXECUTE_PTX"])

"""Fixtures of the operators' tests."""

from collections.abc import Iterator

import pytest
import torch

from rbm_kernels._launching import forget_prepared


@pytest.fixture(autouse=True)
def _prepare_anew() -> Iterator[None]:
    """Discard prepared launches, since tests replace the configurations they were prepared with."""
    forget_prepared()
    yield
    forget_prepared()


@pytest.fixture
def poisoned_empty(monkeypatch) -> None:
    """Make ``torch.empty`` and ``empty_like`` return NaN or a huge negative integer, to expose unwritten elements."""

    def poison(allocate):
        def allocate_poisoned(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else -(2**30))

        return allocate_poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))

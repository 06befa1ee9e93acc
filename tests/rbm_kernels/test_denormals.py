"""Numbers below the normal range count as zeros in all threads, for as long as asked."""

import pytest
import torch

from rbm_kernels import _denormals
from rbm_kernels._denormals import flushed_denormals


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def share_of_zeros() -> float:
    """Of products that all threads compute."""
    small = torch.full((3_000_000,), 1e-38)
    return (small * 0.01 == 0).double().mean().item()


@pytest.mark.native
def test_in_all_threads_and_afterwards_as_before(threads):
    assert share_of_zeros() == 0
    with flushed_denormals():
        assert share_of_zeros() == 1
        with flushed_denormals():
            assert share_of_zeros() == 1
        assert share_of_zeros() == 1
    assert share_of_zeros() == 0
    with pytest.raises(KeyError), flushed_denormals():
        raise KeyError
    assert share_of_zeros() == 0


@pytest.mark.native
def test_operands_too(threads):
    small = torch.full((3_000_000,), 1e-40)
    with flushed_denormals():
        assert (small * 1e10 == 0).all()
    assert (small * 1e10 > 0).all()


def test_without_a_library_in_this_thread():
    like = torch.empty(0)
    assert not _denormals._in_this_thread(like, True)
    try:
        assert (torch.tensor(1e-40) * 1).item() == 0
    finally:
        assert _denormals._in_this_thread(like, False)
    assert (torch.tensor(1e-40) * 1).item() > 0

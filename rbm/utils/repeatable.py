"""Deterministic kernels and a random state of its own for a run: the same seed gives the same numbers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rbm.utils.distributed import forked


@contextmanager
def deterministic() -> Iterator[None]:
    """Repeatable kernels inside, and the caller's random state and settings untouched outside."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling every new tensor finds reads of what was never written; a seventh of an epoch on a CPU goes into it.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with forked():
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fills

"""Deterministic kernels and a separate random state for a run, so that the same seed gives the same numbers."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch

from rbm.utils.distributed import forked


@contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic kernels inside, and restore the caller's random state and settings afterwards."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    # PyTorch would fill every new tensor to expose reads of uninitialised memory: a seventh of an epoch on a CPU.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with forked():
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fills


@contextmanager
def cpu_as_default() -> Iterator[None]:
    """Use the CPU as default device inside; the caller may have set another one, for example for a whole notebook."""
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        yield


@contextmanager
def plain_modes() -> Iterator[None]:
    """Use PyTorch's initial modes inside: gradients enabled, float32, and the CPU as default device.

    The caller may be under ``torch.no_grad()``, ``torch.inference_mode()`` or autocast, or may have set another default
    dtype or device, for example for a whole notebook. All of this is restored afterwards.
    """
    dtype = torch.get_default_dtype()
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                modes.enter_context(torch.autocast(device, enabled=False))
        modes.enter_context(cpu_as_default())
        modes.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        yield

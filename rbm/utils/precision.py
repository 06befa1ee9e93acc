"""Faster float32 matrix products on AMD CPUs: oneDNN instead of MKL, if it is as exact."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

# Error relative to the largest entry: float32 is below this, bfloat16 far above.
_FLOAT32 = 1e-5


@contextmanager
def fast_float32(device: torch.device | str) -> Iterator[None]:
    """Let oneDNN multiply matrices if it is as exact as MKL and about twice as fast: on AMD CPUs with AVX-512.

    PyTorch uses MKL for float32 products, which is limited to AVX2 on AMD CPUs. With the precision "medium", it uses
    oneDNN and allows bfloat16. oneDNN uses bfloat16 only on CPUs with AMX; elsewhere its products are float32
    throughout, which this function checks. Nothing changes on other machines, for another ``device``, or if the caller
    has chosen a precision. Products of a few rows become slower, so this is meant for training.
    """
    if torch.device(device).type != "cpu" or _precision() != "highest" or not _is_faster():
        yield
        return
    with _through_onednn():
        yield


@contextmanager
def _through_onednn() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # precisions were set per backend, so there is no single one
        return "chosen"


@lru_cache
def _is_faster() -> bool:
    try:
        amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return amd and torch.backends.cpu.get_cpu_capability() == "AVX512" and _is_exact()


def _is_exact() -> bool:
    """Whether precision "medium" gives float32 products, tested on positive entries that need all of float32's bits."""
    a = torch.linspace(0, 1, 256 * 256).sqrt().view(256, 256)
    exact = a.double() @ a.double()
    return bool((_product(a) - exact).abs().max() < _FLOAT32 * exact.abs().max())


def _product(a: torch.Tensor) -> torch.Tensor:
    with _through_onednn():
        return a @ a

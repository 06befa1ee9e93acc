"""The precision of matrix products: mixed precision (bfloat16 under autocast), and faster float32 on AMD CPUs.

Mixed precision casts the operands of a forward's matrix products to bfloat16. On CPUs with AVX512-BF16 or AMX they then
take about half the time. Weights stay float32. Losses are computed in float32, from logits that :func:`wide` converts.
Routing and sums over neighbours stay in float32 too, inside :func:`full_precision`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Rows -> (version of the rows, copy in another dtype); an entry disappears with its rows.
_copies = WeakTensorKeyDictionary()
# Error relative to the largest entry: float32 is below this, bfloat16 far above.
_FLOAT32 = 1e-5


def autocast(precision: str, device: torch.device | str) -> AbstractContextManager:
    """Run the forwards inside in ``precision``, ``float32`` or ``bfloat16``, on ``device``.

    Keep backward passes and optimiser steps outside: autocast keeps the cast weights until the block ends.
    """
    if precision == "float32":
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=getattr(torch, precision))


def full_precision(device: torch.device | str) -> AbstractContextManager:
    """Disable autocast inside, for operations that need float32. Their arguments have to be :func:`wide`."""
    if not torch._C._is_any_autocast_enabled():
        return nullcontext()
    return torch.autocast(torch.device(device).type, enabled=False)


def wide(outputs: Any) -> Any:
    """A bfloat16 or float16 tensor as float32, with gradient; of a tuple, its first item, such as the logits before a
    trace. Everything else is returned unchanged.
    """
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
    if type(outputs) is tuple and outputs:
        return (wide(outputs[0]), *outputs[1:])
    return outputs


def autocast_dtype(rows: Tensor, parameters: torch.dtype) -> torch.dtype | None:
    """The dtype that autocast selects on the device of ``rows``; None if autocast is off, and for float64."""
    if not torch._C._is_any_autocast_enabled() or torch.float64 in (rows.dtype, parameters):
        return None
    device = rows.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def cast_once(rows: Tensor) -> Tensor:
    """Constant ``rows`` in the dtype of autocast; unchanged if autocast is off.

    Autocast itself keeps the cast copies of parameters only, and casts rows again in every forward. The copy made here
    is kept until the rows change or are freed.
    """
    dtype = autocast_dtype(rows, rows.dtype)
    if dtype is None or dtype == rows.dtype:
        return rows
    if rows.is_inference():  # has no version counter
        return rows.to(dtype)
    version, copy = _copies.get(rows, (None, None))
    if version != rows._version or copy.dtype != dtype:
        copy = rows.detach().to(dtype)
        _copies[rows] = rows._version, copy
    return copy


@contextmanager
def fast_float32(device: torch.device | str) -> Iterator[None]:
    """Let oneDNN multiply matrices if it is as exact as MKL and faster: on AMD CPUs with AVX-512.

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
        amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
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

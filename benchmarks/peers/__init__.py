"""Alternatives to our operators, each written as well as we could, given the same gates.

``experts.py`` and ``ffn.py`` are plain PyTorch, ``layers.py`` are layers, and ``with_*.py`` is one adapter for each
library of ``libraries.py``. benchmarks/README.md says what each library computes and how it is compared.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.peers.experts import (
    dense_concatenated,
    eager,
    grouped_mm,
    sorted_addmm,
    split_by_expert,
)
from benchmarks.peers.ffn import eager_ffn, expert_matmul_ffn, grouped_mm_ffn, rbm_ffn
from benchmarks.peers.layers import SortedRbMLayer, SplitRbMLayer
from benchmarks.peers.libraries import missing_libraries, usable

__all__ = ["SortedRbMLayer", "SplitRbMLayer", "ffn_peers", "missing_libraries", "peers", "sorted_addmm"]


def peers(dtype: torch.dtype, *, compiled: bool = True) -> dict[str, Callable[..., Tensor]]:
    """Whatever computes what ``expert_matmul`` computes, by name, ours left out.

    Compilation takes seconds for each shape: leave it out of smoke runs.
    """
    found: dict[str, Callable[..., Tensor]] = {
        "eager": eager,
        "split": split_by_expert,
        "sorted": sorted_addmm,
        "grouped_mm": grouped_mm,
        "dense": dense_concatenated,
    }
    if compiled:
        found["eager compiled"] = torch.compile(eager, dynamic=False)
        if dtype == torch.bfloat16:  # the only one that PyTorch traces it for
            found["grouped_mm compiled"] = torch.compile(grouped_mm, dynamic=False)
    return found | usable("experts")


def ffn_peers(*, compiled: bool = True) -> dict[str, Callable[..., Tensor]]:
    """Whatever computes experts of two products with SwiGLU between them, by name: ours too, also with rows copied."""
    found: dict[str, Callable[..., Tensor]] = {
        "rbm": rbm_ffn,
        "rbm, rows copied": expert_matmul_ffn,
        "eager": eager_ffn,
        "grouped_mm": grouped_mm_ffn,
    }
    if compiled:
        found["eager compiled"] = torch.compile(eager_ffn, dynamic=False)
    return found | usable("ffn")

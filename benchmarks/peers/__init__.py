"""Alternatives to our operators, each implemented as well as we could, with the same gates.

``routing.py``, ``experts.py`` and ``ffn.py`` are plain PyTorch, ``layers.py`` has layers, and each library of
``libraries.py`` has an adapter ``with_*.py``. benchmarks/README.md describes what each library computes and how it is
compared.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.peers.experts import (
    MOST_GATHERED,
    dense_concatenated,
    eager,
    gathered,
    grouped_mm,
    sorted_addmm,
    split_by_expert,
)
from benchmarks.peers.ffn import eager_ffn, expert_matmul_ffn, grouped_mm_ffn, rbm_ffn, sorted_ffn
from benchmarks.peers.layers import SortedRbMLayer, SplitRbMLayer, TunedRbMLayer
from benchmarks.peers.libraries import missing_libraries, usable
from benchmarks.peers.routing import by_topk

__all__ = [
    "MOST_GATHERED",
    "SortedRbMLayer",
    "SplitRbMLayer",
    "TunedRbMLayer",
    "by_topk",
    "ffn_peers",
    "gathered",
    "missing_libraries",
    "peers",
    "sorted_addmm",
]


def peers(dtype: torch.dtype, *, compiled: bool = True) -> dict[str, Callable[..., Tensor]]:
    """All implementations of what ``expert_matmul`` computes, by name, except ours.

    Compilation takes seconds per shape, so smoke runs should disable it.
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
        if dtype == torch.bfloat16:  # the only dtype for which PyTorch traces it
            found["grouped_mm compiled"] = torch.compile(grouped_mm, dynamic=False)
    return found | usable("experts")


def ffn_peers(*, compiled: bool = True) -> dict[str, Callable[..., Tensor]]:
    """Implementations of experts with two products and SwiGLU, by name, including ours, also with copied rows."""
    found: dict[str, Callable[..., Tensor]] = {
        "rbm": rbm_ffn,
        "rbm, rows copied": expert_matmul_ffn,
        "eager": eager_ffn,
        "sorted": sorted_ffn,
        "grouped_mm": grouped_mm_ffn,
    }
    if compiled:
        found["eager compiled"] = torch.compile(eager_ffn, dynamic=False)
    return found | usable("ffn")

"""Numbers below the normal range as zeros, in every thread in which PyTorch computes on the CPU.

Processors multiply such numbers, below 1.2e-38 in float32, slowly: a product takes four times as long if they are a
thousandth of its weights (benchmarks/notes/training.md). Confident softmaxes and long weight decay make them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rbm_kernels._library import LIBRARY

LIBRARY.define("flush_denormals(Tensor like, bool flushes) -> bool")


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Within, they count as zeros, as operands and as results; afterwards as before.

    Without librbm_cpu, this holds in the calling thread alone.
    """
    like = torch.empty(0)
    before = torch.ops.rbm.flush_denormals(like, True)
    try:
        yield
    finally:
        torch.ops.rbm.flush_denormals(like, before)


def _in_this_thread(_like: Tensor, flushes: bool) -> bool:
    before = (torch.tensor(1e-40) * 1).item() == 0
    torch.set_flush_denormal(flushes)
    return before


LIBRARY.impl("flush_denormals", _in_this_thread, "CompositeExplicitAutograd")

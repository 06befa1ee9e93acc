"""The Triton kernels behind the operators for CPU tensors: the interpreter runs them, the dispatcher finds them."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from unittest import mock

import torch

from rbm_kernels.cosine_topk import op as cosine_topk
from rbm_kernels.expert_matmul import op as expert_matmul
from rbm_kernels.expert_order import op as expert_order
from rbm_kernels.routed_matmul import op as routed_matmul

# What each operator runs on CUDA.
KERNELS: dict[str, Callable] = {
    "cosine_topk": cosine_topk._cuda,
    "cosine_topk_backward": cosine_topk._cuda_backward,
    "expert_order": expert_order._cuda,
    "expert_matmul": expert_matmul._cuda,
    "expert_matmul_backward_input": expert_matmul._cuda_backward_input,
    "expert_matmul_backward_weight": expert_matmul._cuda_backward_weight,
    "routed_matmul": routed_matmul._cuda,
}


@contextmanager
def serving_kernels() -> Iterator[Counter]:
    """Let the dispatcher send CPU tensors where it sends CUDA tensors, autocast off; count how often it does."""
    calls = Counter()

    def counted(name: str) -> Callable:
        @wraps(KERNELS[name])
        def call(*args, **kwargs):
            calls[name] += 1
            with torch._C._DisableAutocast():
                return KERNELS[name](*args, **kwargs)

        return call

    library = torch.library.Library("rbm", "IMPL")
    try:
        for name in KERNELS:
            library.impl(name, counted(name), "CPU")
        with mock.patch.object(expert_matmul, "_kernels_serve", lambda x: x.dtype != torch.float64):
            yield calls
    finally:
        library._destroy()

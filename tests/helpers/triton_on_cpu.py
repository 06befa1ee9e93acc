"""The Triton kernels behind the operators for CPU tensors: the dispatcher finds them.

The interpreter runs them, or, in a session with ``RBM_EXECUTE_PTX``, ptx_executor.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from unittest import mock

import torch

from ptx_executor import gpu
from rbm_kernels._library import TRITON_OPERATORS as KERNELS
from rbm_kernels.ops.expert_matmul import op as expert_matmul

MATMUL = tuple(name for name in KERNELS if name.startswith("expert_matmul"))


@contextmanager
def serving_kernels(operators=tuple(KERNELS)) -> Iterator[Counter]:
    """Let the dispatcher send CPU tensors where it sends CUDA tensors; count how often it does."""
    calls = Counter()

    def counted(name: str) -> Callable:
        @wraps(KERNELS[name])
        def call(*args, **kwargs):
            calls[name] += 1
            executed = gpu.Gpu.active
            with nullcontext() if executed is None else executed.watching():
                return KERNELS[name](*args, **kwargs)

        return call

    library = torch.library.Library("rbm", "IMPL")
    try:
        for name in operators:
            library.impl(name, counted(name), "CPU")
        with mock.patch.object(expert_matmul, "_kernels_serve", lambda x: x.dtype != torch.float64):
            yield calls
    finally:
        library._destroy()

"""The Triton kernels behind the operators for CPU tensors: the interpreter runs them, the dispatcher finds them."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from unittest import mock

import torch

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

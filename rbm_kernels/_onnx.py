"""What ``torch.onnx.export`` writes for the operators: the same answers by operators that ONNX knows.

The exporter takes apart what ONNX has no operator for, by PyTorch's table of decompositions; this module adds the
operators of inference to it. ``torch.compile`` has a table of its own, and calls the operators as ever. Tracing with
symbolic sizes does read this table, for the shapes of results: so arguments are checked here as elsewhere.

A batch goes through all experts by one matrix product. Only our own operators spare those that a row does not use.
"""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor
from torch.nn import functional as F

from rbm_kernels.checks import accumulation_dtype
from rbm_kernels.ops.cosine_topk import op as routing
from rbm_kernels.ops.cosine_topk.reference import EPS
from rbm_kernels.ops.expert_matmul import op as matmul
from rbm_kernels.ops.routed_matmul import op as both


def cosine_topk(h: Tensor, memory: Tensor, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`rbm_kernels.cosine_topk`. Among equal cosines ONNX's TopK takes the lower expert, as the operator does."""
    dtype = accumulation_dtype(h, memory)
    cosines = F.normalize(h.to(dtype), dim=-1, eps=EPS) @ F.normalize(memory.to(dtype), dim=-1, eps=EPS).T
    nearest, experts = torch.topk(cosines, k, dim=-1)
    return torch.softmax(nearest / temperature, dim=-1), experts.to(torch.int32), nearest


def expert_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, gates: Tensor, experts: Tensor, *order: object
) -> Tensor:
    """:func:`rbm_kernels.expert_matmul`, in the precision of ``x``."""
    num_experts, out_features, _ = weight.shape
    answers = F.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
    answers = answers.unflatten(-1, (num_experts, out_features))
    # A row's gate of every expert: zero where it does not use one.
    everyone = torch.arange(num_experts, dtype=experts.dtype, device=experts.device)
    gate = (gates.to(x.dtype)[:, :, None] * (experts[:, :, None] == everyone).to(x.dtype)).sum(1)
    return (gate[:, None, :] @ answers).squeeze(1)


def routed_matmul(
    x: Tensor, memory: Tensor, weight: Tensor, bias: Tensor | None, k: int, temperature: float = 1.0
) -> Tensor:
    """:func:`rbm_kernels.routed_matmul`, both of the above."""
    gates, experts, _ = cosine_topk(x, memory, k, temperature=temperature)
    return expert_matmul(x, weight, bias, gates, experts)


def register() -> None:
    """Let ``torch.onnx.export`` know."""
    for function, op in ((cosine_topk, routing), (expert_matmul, matmul), (routed_matmul, both)):
        operator = getattr(torch.ops.rbm, function.__name__).default
        torch._decomp.decomposition_table[operator] = _checked(function, op._check)


def _checked(function: Callable, check: Callable) -> Callable:
    @wraps(function)
    def decomposition(*args, **kwargs):
        check(*args, **kwargs)
        return function(*args, **kwargs)

    return decomposition

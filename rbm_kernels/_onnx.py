"""The operators expressed in ONNX operators, for ``torch.onnx.export``.

The public inference functions call these while the exporter traces. They are not registered as decompositions with
PyTorch: ``torch.compile``, which should call our operators, reads the same table, and raises for operators found there
if the environment variable ``CI`` is set.

A batch goes through all experts in one matrix product. Only our own operators skip the experts that a row does not use.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from rbm_kernels import _library
from rbm_kernels.checks import accumulation_dtype
from rbm_kernels.ops.cosine_topk.reference import EPS


def is_exporting() -> bool:
    """Whether ``torch.onnx.export`` is tracing. False within ``torch.compile`` and ``torch.export.export``.

    Raises:
        RuntimeError: it is the deprecated exporter, which traces by TorchScript and does not know our operators.
    """
    # The first check is cheap, and nearly always false.
    if _library.is_exporting():
        return torch.onnx.is_in_onnx_export()
    if torch._C._get_tracing_state() is not None and torch.onnx.is_in_onnx_export():
        raise RuntimeError(
            "torch.onnx.export(..., dynamo=False) cannot export operators of rbm, expected dynamo=True, the default:"
            " leave dynamo=False out"
        )
    return False


def cosine_topk(h: Tensor, memory: Tensor, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`rbm_kernels.cosine_topk`. ONNX's TopK also prefers the lower expert among equal cosines."""
    dtype = accumulation_dtype(h, memory)
    cosines = F.normalize(h.to(dtype), dim=-1, eps=EPS) @ F.normalize(memory.to(dtype), dim=-1, eps=EPS).T
    nearest, experts = torch.topk(cosines, k, dim=-1)
    return torch.softmax(nearest / temperature, dim=-1), experts.to(torch.int32), nearest


def expert_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, gates: Tensor, experts: Tensor) -> Tensor:
    """:func:`rbm_kernels.expert_matmul`, in the precision of ``x``."""
    num_experts, out_features, _ = weight.shape
    answers = F.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
    answers = answers.unflatten(-1, (num_experts, out_features))
    # Each row's gate for every expert: zero if the row does not use the expert.
    all_experts = torch.arange(num_experts, dtype=experts.dtype, device=experts.device)
    gate = (gates.to(x.dtype)[:, :, None] * (experts[:, :, None] == all_experts).to(x.dtype)).sum(1)
    return (gate[:, None, :] @ answers).squeeze(1)

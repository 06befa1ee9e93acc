"""Definition of the routed matmul in plain eager PyTorch: the reference of the routing, then that of the matmul."""

from torch import Tensor

from rbm_kernels.checks import accumulation_dtype
from rbm_kernels.ops.cosine_topk import reference as routing
from rbm_kernels.ops.expert_matmul import reference as matmul


def routed_matmul(
    x: Tensor, memory: Tensor, weight: Tensor, bias: Tensor | None, k: int, temperature: float = 1.0
) -> Tensor:
    """``y [B, N]``: the rows of ``x [B, D]`` through the ``k`` experts chosen by ``memory [E, D]``."""
    gates, experts, _ = routing.cosine_topk(x, memory, k, temperature)
    # A float64 memory gives float64 gates for float32 rows.
    return matmul.expert_matmul(x, weight, bias, gates.to(accumulation_dtype(x)), experts)

"""What the tests of the whole layer in one operator compare, on a GPU: its result, with the references' in float64."""

import torch
from float32_sums import check_float32_sums
from on_gpu import float32_products

from rbm_kernels import routed_matmul
from rbm_kernels.ops.cosine_topk import reference as routing
from rbm_kernels.ops.expert_matmul import reference as matmul


def check(x, memory, weight, bias, k, temperature=1.0, precision="ieee") -> None:
    """The result against the reference in float64; k products of D one after the other.

    Eager PyTorch, its peer, gets the exact routing: in TF32 it would send rows elsewhere. Rows whose choice a rounding
    of float32 decides are replaced.
    """
    wide, directions = x.double(), memory.double()
    if k < len(memory) and x.numel():
        top = routing.cosine_topk(wide, directions, k + 1)[2]
        gap = top[:, -2] - top[:, -1]
        x[gap < 1e-5] = x[gap.argmax()].clone()
        wide = x.double()
    gates, experts, _ = routing.cosine_topk(wide, directions, k, temperature)
    arguments = wide, weight.double(), None if bias is None else bias.double(), gates
    exact = matmul.expert_matmul(*arguments, experts)
    squares = matmul.expert_matmul(*(None if t is None else t.square() for t in arguments), experts)
    with torch.no_grad(), float32_products("tf32" if precision == "tf32" else "ieee"):
        y = routed_matmul(x, memory, weight, bias, k, temperature=temperature)
        eager = matmul.expert_matmul(x, weight, bias, gates.float(), experts)
    check_float32_sums("y", y, exact, eager, squares, k * (x.shape[1] + 1), precision)

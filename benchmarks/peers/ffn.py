"""Experts with two products and SwiGLU, in plain PyTorch and with our operators.

Liger and SonicMoE only compute this, so they are compared here. For a row x with experts e and gates g the result is
``sum over e of g * down[e] @ (silu(a) * b)``, where ``a, b`` are the halves of ``up[e] @ x``.

A peer takes ``x [B, D]``, ``up [E, 2 I, D]``, ``down [E, D, I]``, ``gates [B, k]`` (float32) and ``experts [B, k]``
(int32) and returns ``y [B, D]`` in x's dtype, differentiable. If rows are only multiplied with their own experts, this
takes ``6 B k D I`` operations, three times those of ``expert_matmul`` at N = I.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers.experts import gate_of_expert, grouped_products, inverse, sort_pairs
from rbm.nn.feed_forward import expert_feed_forward
from rbm_kernels import expert_matmul
from rbm_kernels.cost import Cost
from rbm_kernels.ops.packed_feed_forward.reference import swiglu


def eager_ffn(x: Tensor, up: Tensor, down: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """Every expert sees every row; gates are zero if a row does not use an expert."""
    gate = gate_of_expert(gates.to(x.dtype), experts, up.shape[0])
    y = torch.zeros_like(x)
    for expert in range(up.shape[0]):
        y = y + gate[:, expert, None] * (swiglu(x @ up[expert].T) @ down[expert].T)
    return y


def sorted_ffn(x: Tensor, up: Tensor, down: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """Sort the (row, expert) pairs by expert, two products per expert, ``index_add`` the gated results."""
    pairs, ends = sort_pairs(experts, up.shape[0])
    rows, gate = pairs // experts.shape[1], gates.flatten()[pairs].to(x.dtype)
    y, begin = torch.zeros_like(x), 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            mine = slice(begin, end)
            out = F.linear(swiglu(F.linear(x[rows[mine]], up[expert])), down[expert])
            y = y.index_add(0, rows[mine], out * gate[mine, None])
            begin = end
    return y


def rbm_ffn(x: Tensor, up: Tensor, down: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """What :class:`rbm.RbMFeedForward` computes after routing."""
    return expert_feed_forward(x, up, None, down, None, gates, experts, activation="swiglu")


def expert_matmul_ffn(x: Tensor, up: Tensor, down: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """Two calls of ``expert_matmul`` with PyTorch in between. Each (row, expert) pair is a row of its own.

    Our operator sums over a row's experts, which must not happen before SwiGLU; hence the pairs.
    """
    rows, k = experts.shape
    pairs, ones = experts.reshape(-1, 1), torch.ones(rows * k, 1, device=x.device)
    hidden = expert_matmul(x.repeat_interleave(k, 0), up, up.new_zeros(up.shape[:2]), ones, pairs)
    out = expert_matmul(swiglu(hidden), down, down.new_zeros(down.shape[:2]), gates.reshape(-1, 1), pairs)
    return out.view(rows, k, -1).sum(1)


def dense_ffn(x: Tensor, up: Tensor, down: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """Two dense linear layers with the same number of operations, ``k I`` hidden features wide, without routing."""
    k = gates.shape[1]
    hidden = swiglu(F.linear(x, up[:k].flatten(0, 1)).unflatten(-1, (k, -1)))
    return F.linear(hidden.flatten(-2), down[:k].transpose(0, 1).flatten(1))


def grouped_mm_ffn(x: Tensor, up: Tensor, down: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """PyTorch's grouped matmul, twice, over the sorted pairs."""
    pairs, ends = sort_pairs(experts, up.shape[0])
    hidden = swiglu(grouped_products(x[pairs // experts.shape[1]], up, ends))
    by_row = grouped_products(hidden, down, ends)[inverse(pairs)].view(*experts.shape, -1)
    return (by_row * gates.to(x.dtype)[..., None]).sum(1)


def cost_forward(rows: int, features: int, hidden: int, num_experts: int, k: int, dtype: torch.dtype) -> Cost:
    """Bytes ``s (2 B D + 3 E' D I) + 8 B k``, ``E' = min(E, B k)``; operations ``6 B k D I``."""
    moved = 2 * rows * features + 3 * min(num_experts, rows * k) * features * hidden
    return Cost(dtype.itemsize * moved + 8 * rows * k, 6 * rows * k * features * hidden)


def cost_backward(rows: int, features: int, hidden: int, num_experts: int, k: int, dtype: torch.dtype) -> Cost:
    """Bytes ``s (3 B D + 6 E D I) + 12 B k``; operations ``12 B k D I``, not counting recomputation.

    The gradient, x, weights, gates and experts are read; four gradients are written.
    """
    moved = 3 * rows * features + 6 * num_experts * features * hidden
    return Cost(dtype.itemsize * moved + 12 * rows * k, 12 * rows * k * features * hidden)

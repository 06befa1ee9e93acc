"""The experts in plain PyTorch, implemented in several ways as well as we could.

A peer has the signature of ``expert_matmul``: ``x [B, D]``, ``weight [E, N, D]``, ``bias [E, N]``, ``gates [B, k]``
(float32) and ``experts [B, k]`` (int32) to ``y [B, N]`` in x's dtype, differentiable.

Loops over experts unbind the weights first. The gradient of ``weight[expert]`` has the size of all weights, so E of
them take seconds of a training step with large experts.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

# From about this many rows on, sorted pairs are faster than gathered weights (Zen 4, 8 experts, 256 features).
MOST_GATHERED = 512
# Rows of an operand of PyTorch's grouped matmul must start at multiples of this many bytes.
ALIGNMENT = 16


def eager(x: Tensor, weight: Tensor, bias: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """Every expert sees every row; gates are zero if a row does not use an expert."""
    gate = gate_of_expert(gates.to(x.dtype), experts, weight.shape[0])
    y = gate @ bias
    for expert, matrix in enumerate(weight.unbind()):
        y = y + gate[:, expert, None] * (x @ matrix.T)
    return y


def split_by_expert(x: Tensor, weight: Tensor, bias: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """The method of the released code: find each expert's rows, run its linear layer on them, gate, ``index_add``."""
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for expert, parameters in enumerate(zip(weight.unbind(), bias.unbind(), strict=True)):
        rows, choice = torch.nonzero(experts == expert, as_tuple=True)
        if len(rows):
            out = F.linear(x[rows], *parameters)
            y = y.index_add(0, rows, out * gates[rows, choice, None].to(x.dtype))
    return y


def sorted_addmm(x: Tensor, weight: Tensor, bias: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """Sort the (row, expert) pairs by expert, one ``addmm`` per expert, ``index_add`` the gated results.

    The host determines the sizes of the products, so each call waits for the device once and cannot be captured in a
    CUDA graph. :func:`grouped_mm` is this algorithm without the wait.
    """
    pairs, ends = sort_pairs(experts, weight.shape[0])
    rows, gate = pairs // experts.shape[1], gates.flatten()[pairs]
    y = x.new_zeros(x.shape[0], weight.shape[1])
    begin = 0
    for end, matrix, offset in zip(ends.tolist(), weight.unbind(), bias.unbind(), strict=True):
        if end > begin:
            mine = slice(begin, end)
            out = torch.addmm(offset, x[rows[mine]], matrix.T)
            y = y.index_add_(0, rows[mine], out * gate[mine, None].to(x.dtype))
            begin = end
    return y


def grouped_mm(x: Tensor, weight: Tensor, bias: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """PyTorch's grouped matmul over the sorted pairs, moved back to their rows and summed with their gates.

    The host never waits, so it can be captured in a CUDA graph if PyTorch's own kernel does not wait either. Widths
    whose rows are not multiples of 16 bytes are padded in the call, because PyTorch does not accept them.
    """
    pairs, ends = sort_pairs(experts, weight.shape[0])
    by_row = grouped_products(x[pairs // experts.shape[1]], weight, ends)[inverse(pairs)].view(*experts.shape, -1)
    gate = gates.to(x.dtype)
    # Biases are added by a product: their gradient through bias[experts] would be summed in the rows' precision.
    return (by_row * gate[..., None]).sum(1) + gate_of_expert(gate, experts, weight.shape[0]) @ bias


def dense_concatenated(x: Tensor, weight: Tensor, bias: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """One large product: each row once per expert, scaled by its gate, times all experts' weights."""
    gate = gate_of_expert(gates.to(x.dtype), experts, weight.shape[0])
    stacked = (gate[:, :, None] * x[:, None, :]).flatten(1)
    return torch.addmm(gate @ bias, stacked, weight.permute(0, 2, 1).flatten(0, 1))


def gathered(x: Tensor, weight: Tensor, bias: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """Each row times the weights of its own experts, for up to :data:`MOST_GATHERED` rows.

    Compile it: ``torch.compile`` reads the weights where they are, but eager PyTorch copies them, ``[B, k, N, D]``.
    """
    chosen = experts.long()
    products = (weight[chosen] * x[:, None, None, :]).sum(-1) + bias[chosen]
    return (products * gates.to(x.dtype)[..., None]).sum(1)


def gate_of_expert(gates: Tensor, experts: Tensor, num_experts: int) -> Tensor:
    """Gates as ``[B, E]``, zero if a row does not use an expert."""
    return gates.new_zeros(gates.shape[0], num_experts).scatter(1, experts.long(), gates)


def sort_pairs(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Indices ``[B k]`` of the (row, choice) pairs sorted by expert, and the end of each expert's range, int32 ``[E]``.

    The ends are found in the sorted experts. ``bincount`` would make the host wait for the device, and a sum of one-hot
    rows would write E numbers per pair.
    """
    by_expert, pairs = experts.flatten().sort(stable=True)
    every = torch.arange(num_experts, device=experts.device, dtype=by_expert.dtype)
    return pairs, torch.searchsorted(by_expert, every, right=True, out_int32=True)


def inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation ``[n]``."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def grouped_products(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Sorted rows ``[n, D]`` times their experts' weights ``[E, N, D]``: ``[n, N]``.

    ``ends`` int32 ``[E]`` is where each expert's rows end. Widths are padded with zeros to PyTorch's alignment: D,
    along which rows and weights are read, and N, along which the backward pass reads the gradient.
    """
    out_features, width = weight.shape[1], ALIGNMENT // x.element_size()
    more_in, more_out = -x.shape[1] % width, -out_features % width
    if more_in or more_out:
        x, weight = F.pad(x, (0, more_in)), F.pad(weight, (0, more_in, 0, more_out))
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)[:, :out_features]

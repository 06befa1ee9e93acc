"""What others would do in the place of our operators, each written as well as we could, given the same gates.

A peer has the signature of ``expert_matmul`` and is differentiable. Libraries that are not installed are left out by
name.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from rbm.nn.reference import ReferenceRbMLayer
from rbm_kernels.cosine_topk import reference as routing

LIBRARIES = ("scattermoe", "megablocks", "tutel", "liger_kernel")


def eager(x: Tensor, weight: Tensor, bias: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """Every expert sees every row; gates are zero where a row does not use one."""
    gate = _gate_of_expert(gates.to(x.dtype), experts, weight.shape[0])
    y = gate @ bias
    for expert in range(weight.shape[0]):
        y = y + gate[:, expert, None] * (x @ weight[expert].T)
    return y


def split_by_expert(x: Tensor, weight: Tensor, bias: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """The way of the released code: find each expert's rows, run its linear layer on them, gate, ``index_add``."""
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for expert in range(weight.shape[0]):
        rows, choice = torch.nonzero(experts == expert, as_tuple=True)
        if len(rows):
            out = F.linear(x[rows], weight[expert], bias[expert])
            y = y.index_add(0, rows, out * gates[rows, choice, None].to(x.dtype))
    return y


def sorted_addmm(x: Tensor, weight: Tensor, bias: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """Sort the (row, expert) pairs by expert, one ``addmm`` an expert, ``index_add`` the gated results."""
    rows, gate, counts = _sorted_pairs(gates, experts, weight.shape[0])
    y = x.new_zeros(x.shape[0], weight.shape[1])
    begin = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            mine = slice(begin, begin + count)
            out = torch.addmm(bias[expert], x[rows[mine]], weight[expert].T)
            y = y.index_add_(0, rows[mine], out * gate[mine, None].to(x.dtype))
            begin += count
    return y


def grouped_mm(x: Tensor, weight: Tensor, bias: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """PyTorch's grouped matmul over the sorted pairs, brought back to their rows and summed with their gates."""
    flat = experts.flatten()
    pairs = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=weight.shape[0]).cumsum(0).int()
    out = F.grouped_mm(x[pairs // experts.shape[1]], weight.transpose(1, 2), offs=ends)
    places = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(len(pairs), device=x.device))
    gate = gates.to(x.dtype)
    by_row = out[places].view(*experts.shape, -1)
    # The biases by a product: their gradient through bias[experts] would be summed in the rows' precision.
    return (by_row * gate[..., None]).sum(1) + _gate_of_expert(gate, experts, weight.shape[0]) @ bias


def dense_concatenated(x: Tensor, weight: Tensor, bias: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """One large product: the row once for each expert, scaled by its gate, against all experts' weights."""
    gate = _gate_of_expert(gates.to(x.dtype), experts, weight.shape[0])
    stacked = (gate[:, :, None] * x[:, None, :]).flatten(1)
    return torch.addmm(gate @ bias, stacked, weight.permute(0, 2, 1).flatten(0, 1))


def peers(dtype: torch.dtype, *, compiled: bool = True) -> dict[str, Callable[..., Tensor]]:
    """All of them by name. Compilation takes seconds for each shape: leave it out of smoke runs."""
    found: dict[str, Callable[..., Tensor]] = {
        "eager": eager,
        "split": split_by_expert,
        "sorted": sorted_addmm,
        "grouped_mm": grouped_mm,
        "dense": dense_concatenated,
    }
    if compiled:
        found["eager compiled"] = torch.compile(eager, dynamic=False)
        if dtype == torch.bfloat16:  # the only one that PyTorch traces it for
            found["grouped_mm compiled"] = torch.compile(grouped_mm, dynamic=False)
    return found


def missing_libraries() -> list[str]:
    """The libraries that would be measured too if they were installed."""
    return [name for name in LIBRARIES if find_spec(name) is None]


class _SparseRbMLayer(ReferenceRbMLayer):
    """The reference layer with its experts run on the rows that use them alone: by ``_combine`` of what is below."""

    def forward(self, h: Tensor) -> Tensor:
        """Rows ``[B, in_features]`` to ``[B, out_features]``."""
        gates, experts, _ = routing.cosine_topk(h, self.memory.detach(), self.top_k)
        gates = gates.detach()
        y = self._combine(h, gates, experts)
        if self.training:
            chosen = torch.zeros_like(_gate_of_expert(gates, experts, self.num_experts), dtype=torch.bool)
            chosen.scatter_(1, experts.long(), True)
            rows = h.detach().to(self.memory.dtype)
            self._move_memory(rows, _gate_of_expert(gates, experts, self.num_experts), chosen)
        return y


class SplitRbMLayer(_SparseRbMLayer):
    """The way of the released code: attention multiplies activations, and each expert's rows are split off for it."""

    def _combine(self, h: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        y = h.new_zeros(h.shape[0], self.out_features)
        for expert in range(self.num_experts):
            rows, choice = torch.nonzero(experts == expert, as_tuple=True)
            if len(rows):
                scaled = h[rows] * self.attention[expert].exp()
                out = F.linear(scaled, self.weight[expert], self.bias[expert])
                y = y.index_add(0, rows, out * gates[rows, choice, None].to(h.dtype))
        return self.log_scale.exp() * y


class SortedRbMLayer(_SparseRbMLayer):
    """Attention and scale folded into the weights, once for serving, and sorted experts."""

    folded: tuple[Tensor, Tensor] | None = None

    def _combine(self, h: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        weight, bias = self._fold() if self.training else (self.folded or self._fold())
        return sorted_addmm(h, weight, bias, gates, experts)

    def eval(self) -> "SortedRbMLayer":
        """For serving: the weights are folded now and kept."""
        super().eval()
        with torch.no_grad():
            self.folded = self._fold()
        return self

    def _fold(self) -> tuple[Tensor, Tensor]:
        scale = self.log_scale.exp()
        return self.weight * (scale * self.attention.exp())[:, None, :], self.bias * scale


def _gate_of_expert(gates: Tensor, experts: Tensor, num_experts: int) -> Tensor:
    """Gates as ``[B, E]``, zero where a row does not use an expert."""
    return gates.new_zeros(gates.shape[0], num_experts).scatter(1, experts.long(), gates)


def _sorted_pairs(gates: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and gates of the pairs in order of their experts, and how many each expert has."""
    flat = experts.flatten()
    pairs = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    return pairs // experts.shape[1], gates.flatten()[pairs], counts

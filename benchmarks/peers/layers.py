"""The layer as others would write it: the reference layer, running each expert only on the rows that use it."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers.experts import MOST_GATHERED, gate_of_expert, gathered, inverse, sort_pairs, sorted_addmm
from benchmarks.peers.routing import by_topk, nearest
from rbm.nn.reference import ReferenceRbMLayer


class _SparseRbMLayer(ReferenceRbMLayer):
    """The reference layer, running each expert only on the rows that use it; subclasses implement ``_combine``."""

    def forward(self, h: Tensor) -> Tensor:
        """Rows ``[B, in_features]`` to ``[B, out_features]``."""
        gates, experts, _ = by_topk(h, self.memory.detach(), self.top_k)
        gates = gates.detach()
        y = self._combine(h, gates, experts)
        if self.training:
            chosen = torch.zeros_like(gate_of_expert(gates, experts, self.num_experts), dtype=torch.bool)
            chosen.scatter_(1, experts.long(), True)
            rows = h.detach().to(self.memory.dtype)
            self._move_memory(rows, gate_of_expert(gates, experts, self.num_experts), chosen)
        return y


class SplitRbMLayer(_SparseRbMLayer):
    """The method of the released code: attention multiplies activations, and each expert's rows are split off."""

    def _combine(self, h: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        y = h.new_zeros(h.shape[0], self.out_features)
        parameters = zip(self.attention.unbind(), self.weight.unbind(), self.bias.unbind(), strict=True)
        for expert, (attention, weight, bias) in enumerate(parameters):
            rows, choice = torch.nonzero(experts == expert, as_tuple=True)
            if len(rows):
                out = F.linear(h[rows] * attention.exp(), weight, bias)
                y = y.index_add(0, rows, out * gates[rows, choice, None].to(h.dtype))
        return self.log_scale.exp() * y


class SortedRbMLayer(_SparseRbMLayer):
    """Attention and scale folded into the weights (once, for serving), and sorted experts."""

    folded: tuple[Tensor, Tensor] | None = None

    def _combine(self, h: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        weight, bias = self.folded or self._fold()
        return sorted_addmm(h, weight, bias, gates, experts)

    def train(self, mode: bool = True) -> "SortedRbMLayer":
        """For serving, fold the weights once and keep them; ``eval()`` calls this too."""
        super().train(mode)
        with torch.no_grad():
            self.folded = None if mode else self._fold()
        return self

    def _fold(self) -> tuple[Tensor, Tensor]:
        scale = self.log_scale.exp()
        return self.weight * (scale * self.attention.exp())[:, None, :], self.bias * scale


class TunedRbMLayer(SortedRbMLayer):
    """The fastest that we found for serving: compiled, by another algorithm for few rows than for many.

    Weights are folded and memories normalised beforehand. Up to :data:`MOST_GATHERED` rows read the weights of their
    own experts. More are sorted by expert, and all but the products is compiled. Functions of tensors are compiled
    instead of the module, because a module's guards take a tenth of the time of one row.
    """

    def forward(self, h: Tensor) -> Tensor:
        """Rows ``[B, in_features]`` to ``[B, out_features]``."""
        weight, bias = self.folded
        if len(h) <= MOST_GATHERED:
            return _route_and_gather(h, self.unit_memory, weight, bias, self.top_k)
        rows, back, ends, gates = _route_and_sort(h, self.unit_memory, self.top_k)
        products, begin = rows.new_empty(len(rows), self.out_features), 0
        for expert, end in enumerate(ends.tolist()):
            if end > begin:
                torch.addmm(bias[expert], rows[begin:end], weight[expert].T, out=products[begin:end])
                begin = end
        return _sum_by_row(products, back, gates)

    def train(self, mode: bool = True) -> "TunedRbMLayer":
        """Prepare for serving, which is all that this layer does."""
        self.unit_memory = F.normalize(self.memory, dim=-1)
        return super().train(mode)


_compiled = partial(torch.compile, dynamic=False)


def _route(h: Tensor, unit_memory: Tensor, k: int) -> tuple[Tensor, Tensor]:
    cosines, experts = nearest(h, unit_memory, k)
    return cosines.softmax(-1), experts


@_compiled
def _route_and_gather(h: Tensor, unit_memory: Tensor, weight: Tensor, bias: Tensor, k: int) -> Tensor:
    return gathered(h, weight, bias, *_route(h, unit_memory, k))


@_compiled
def _route_and_sort(h: Tensor, unit_memory: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gates, experts = _route(h, unit_memory, k)
    pairs, ends = sort_pairs(experts, len(unit_memory))
    return h[pairs // k], inverse(pairs), ends, gates


@_compiled
def _sum_by_row(products: Tensor, back: Tensor, gates: Tensor) -> Tensor:
    return (products[back].view(*gates.shape, -1) * gates.to(products.dtype)[..., None]).sum(1)

r"""The vanilla sparse mixture of experts. Its router is learned by gradient descent instead of following the rows.

The address of a row is ``z = n(W h + b)``, that of an expert is a column ``u_i`` of a learned matrix. A row goes to the
``top_k`` experts with the largest ``t cos(z, u_i)``; ``t`` is learned. In training, noise is added to these logits.
Importance and load of the experts are balanced (Shazeer et al., Outrageously Large Neural Networks, ICLR 2017). The
router is that of Chi et al., On the Representation Collapse of Sparse Mixture of Experts, NeurIPS 2022. The experts run
on the same kernels as those of RbM, so that timings compare the routers.
"""

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rbm.nn import losses
from rbm.nn import sparse_rows as sparse
from rbm.nn.folded_weights import fold
from rbm.nn.memory_router import Routing, copy_expert, draw_experts
from rbm.nn.scaled_experts import scaled_expert_matmul
from rbm.nn.sparse_rows import Features, Rows, as_rows, dropout, linear
from rbm.nn.stored_tensors import check_stored
from rbm.nn.students import MixtureStudent, layer_sizes
from rbm.utils.arguments import check_choice, check_probability, check_sizes, check_top_k, check_weight
from rbm.utils.defaults import NUM_EXPERTS, TOP_K
from rbm.utils.distributed import all_reduce_sum
from rbm.utils.precision import full_precision, wide
from rbm_kernels import NetworkLayer
from rbm_kernels.ops.fold_experts.reference import input_scale


class MoELayer(nn.Module):
    r"""Maps rows ``[B, in_features]`` to ``exp(s) sum_i G_i f_i(h)``, ``[B, out_features]``, with a learned router.

    Args:
        in_features, out_features: sizes of a row and of an output row.
        num_experts: ``E``.
        top_k: experts a row uses.
        router_features: size of a row's address ``z``.
        dropout: probability of zeroing a feature of the experts' input.
        gates_over: with ``selected``, the gates of a row are a softmax over its experts; with ``all``, they are the
            values of these experts in a softmax over all experts, which do not sum to one.
        noise: standard deviation of the noise on the router's logits in training, times the number of experts.
        pretrain: routing of :meth:`expert_forward`: ``first`` sends all rows to the first expert; ``proportional``
            sends the first ``1 / E`` of the rows to the first expert, and so on.

    Attributes:
        weight, bias: of the experts, ``[E, out_features, in_features]`` and ``[E, out_features]``.
        router: the linear map to ``z``.
        addresses: ``[router_features, E]``.
        log_temperature, log_scale: scalars, the logarithms of ``t`` and of the output's scale; no factor exceeds 100.

    Raises:
        ValueError: ``top_k > num_experts``, a number is out of range, or a name is unknown.
        TypeError: an argument has the wrong type, such as 3.0 for an integer.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_experts: int = NUM_EXPERTS,
        top_k: int = TOP_K,
        *,
        router_features: int,
        dropout: float = 0.0,
        gates_over: str = "selected",
        noise: float = 1.0,
        pretrain: str = "first",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.num_experts, router_features = check_sizes(
            in_features=in_features,
            out_features=out_features,
            num_experts=num_experts,
            router_features=router_features,
        )
        self.top_k = check_top_k(top_k, self.num_experts)
        self.dropout = check_probability("dropout", dropout)
        self.noise = check_weight("noise", noise)
        check_choice("gates_over", gates_over, ("selected", "all"))
        check_choice("pretrain", pretrain, ("first", "proportional"))
        self.gates_over, self.pretrain = gates_over, pretrain
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features))
        draw_experts(self.weight, self.bias)
        self.router = sparse.Linear(in_features, router_features)
        # In place: a product of tensors on the device "meta" would import PyTorch's compiler.
        self.addresses = nn.Parameter(torch.randn(router_features, num_experts).mul_(0.01))
        self.log_temperature = nn.Parameter(torch.tensor(math.log(2.0)))
        self.log_scale = nn.Parameter(torch.tensor(math.log(2.0)))

    def forward(self, h: Features, *, return_routing: bool = False) -> Tensor | tuple[Tensor, Routing]:
        """Map rows to outputs; with ``return_routing`` also return gates, experts and cosines, ``[B, k]``."""
        rows = as_rows(h)
        addresses = wide(self.router(rows))
        with full_precision(addresses.device):  # a cosine of 8 bits would send rows to other experts
            cosines = F.normalize(addresses, dim=-1) @ F.normalize(wide(self.addresses), dim=0)
        logits = input_scale(None, self.log_temperature) * cosines
        if self.training and self.noise > 0:
            logits = logits + self.noise / self.num_experts * torch.randn_like(logits)
        top, experts = logits.topk(self.top_k, dim=-1)
        gates = top.softmax(-1) if self.gates_over == "selected" else logits.softmax(-1).gather(-1, experts)
        y = self._combine(rows, gates, experts.int())
        return (y, Routing(gates, experts.int(), cosines.gather(-1, experts))) if return_routing else y

    def expert_forward(self, h: Features) -> Tensor:
        """Forward without the router, for pretraining."""
        rows = dropout(as_rows(h), self.dropout, self.training)
        if self.pretrain == "first":
            return linear(rows, self.weight[0], self.bias[0])
        ends = [rows.shape[0] * i // self.num_experts for i in range(self.num_experts + 1)]
        parts = [
            linear(rows[start:end], self.weight[i], self.bias[i])
            for i, (start, end) in enumerate(itertools.pairwise(ends))
        ]
        return torch.cat(parts)

    def network_layer(self) -> NetworkLayer | None:
        """The layer in the form that :func:`rbm_kernels.packed_network` takes; None for cosines that are divided by
        infinity or NaN, as training may end if its learning rate is too high.
        """
        temperature = 1 / input_scale(None, self.log_temperature)
        if not temperature.isfinite():
            return None
        return NetworkLayer(
            *fold(self.weight, self.bias, None, self.log_scale),
            self.out_features,
            self.in_features,
            self.addresses.T,
            self.top_k,
            temperature.item(),
            (self.router.weight, self.router.bias),
            self.gates_over == "all",
        )

    def clone_expert(self, expert: int = 0) -> None:
        """Copy the weight and bias of one expert to all experts; RuntimeError if they are parametrised or pruned."""
        check_stored(self, ("weight", "bias"), "clone_expert() writes")
        copy_expert(self.weight, self.bias, expert)

    def _combine(self, rows: Rows, gates: Tensor, experts: Tensor) -> Tensor:
        parameters = (self.weight, self.bias, None, self.log_scale)
        return scaled_expert_matmul(rows, *parameters, gates, experts, self.dropout, self.training)


class MoEStudent(MixtureStudent):
    """Stack of :class:`MoELayer`. ``layer_options`` are further keyword arguments of the layers."""

    layer_type = MoELayer

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        *,
        num_layers: int = 2,
        num_experts: int = NUM_EXPERTS,
        top_k: int = TOP_K,
        norm: str = "none",
        **layer_options,
    ) -> None:
        sizes = layer_sizes(in_channels, hidden_channels, out_channels, num_layers)
        layers = (
            self.layer_type(*size, num_experts, top_k, router_features=hidden_channels, **layer_options)
            for size in sizes
        )
        super().__init__(layers, norm)


def balance_loss(routing: Routing, num_experts: int) -> Tensor:
    """Squared coefficients of variation of the experts' importance (sums of gates) and load (numbers of rows), added.

    As in the released code, the load is a count, without a gradient, whereas Shazeer et al. smooth it.
    """
    chosen = F.one_hot(routing.experts.flatten().long(), num_experts).sum(0).to(routing.gates.dtype)
    return losses.load_balance_loss(routing, num_experts) + losses.squared_variation(all_reduce_sum(chosen))

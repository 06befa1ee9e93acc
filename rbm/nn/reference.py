"""Direct implementations of the paper's equations in eager PyTorch, as a reference for tests and benchmarks."""

import torch
from torch import Tensor
from torch.nn import functional as F

from rbm.nn.dropout import dropout
from rbm.nn.feed_forward import ACTIVATIONS, RbMFeedForward
from rbm.nn.memory_router import MemoryRouter, Routing
from rbm.nn.rbm_layer import FusedRbMLayer
from rbm_kernels.ops.fold_experts.reference import MAX_LOG_SCALE


class _ReferenceRouter(MemoryRouter):
    """Routing and memory as in the equations; ``_mixture`` of a subclass sums the outputs of its experts.

    The memory moves at the end of the forward pass, as in the released code. Do not use activation checkpointing.
    """

    def forward(self, h: Tensor, *, return_routing: bool = False) -> Tensor | tuple[Tensor, Routing]:
        """Like the forward of the fused layer, for dense rows only."""
        rows = h.reshape(-1, self.in_features)

        # Eq. 3: cosines, top-k, softmax over the selected.
        wide = rows.to(self.memory.dtype)
        all_cosines = F.normalize(wide, dim=-1) @ F.normalize(self.memory.detach(), dim=-1).T
        cosines, experts = torch.topk(all_cosines, self.top_k, dim=-1)
        gates = torch.softmax(cosines / self.gate_temperature, dim=-1)
        chosen = F.one_hot(experts, self.num_experts).to(gates.dtype)
        gate_of_expert = (gates[:, :, None] * chosen).sum(1)

        y = self._mixture(rows, gate_of_expert.detach() if self.detach_gates else gate_of_expert)
        if self.training:
            self._move_memory(wide.detach(), gate_of_expert.detach(), chosen.sum(1) > 0)
        leading = h.shape[:-1]
        y = y.reshape(*leading, self.out_features)
        if not return_routing:
            return y
        routing = Routing(*(part.reshape(*leading, self.top_k) for part in (gates, experts.int(), cosines)))
        return y, routing

    def accumulate_memory(self):
        """Not supported, because the memory moves in each forward. Accumulation must equal one forward over all rows.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("the reference moves its memory in each forward: give it the whole batch at once")

    @torch.no_grad()
    def _move_memory(self, rows: Tensor, gate_of_expert: Tensor, routed: Tensor) -> None:
        # Eq. 4: for each expert, a softmax of the gates over its rows.
        shares = torch.softmax(gate_of_expert.masked_fill(~routed, float("-inf")), dim=0)
        target = shares.nan_to_num().T @ (F.normalize(rows, dim=-1) if self.normalize_memory_input else rows)
        old = F.normalize(self.memory, dim=-1) if self.normalize_memory else self.memory
        moved = self.decay * old + (1 - self.decay) * target
        self.memory.copy_(torch.where(routed.any(0)[:, None], moved, self.memory))


class ReferenceRbMLayer(_ReferenceRouter, FusedRbMLayer):
    """:class:`~rbm.nn.rbm_layer.FusedRbMLayer` without its operators, with equal arguments and ``state_dict``.

    Every expert sees every row, attention and scale multiply activations instead of weights, and the memory moves at
    the end of the forward pass, as in the released code. Do not use activation checkpointing.

    Args:
        dropout_per_expert: draw one dropout mask per expert, after the attention, as the released code does.
        args, kwargs: arguments of :class:`~rbm.nn.rbm_layer.FusedRbMLayer`.
    """

    def __init__(self, *args, dropout_per_expert: bool = False, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.dropout_per_expert = dropout_per_expert

    def _mixture(self, rows: Tensor, gate_of_expert: Tensor) -> Tensor:
        # Eq. 5: exp(s) sum_i G_i f_i(exp(a_i) * h).
        shared = rows if self.dropout_per_expert else dropout(rows, self.dropout, self.training)
        y = rows.new_zeros(rows.shape[0], self.out_features)
        for i in range(self.num_experts):
            x = shared
            if self.attention is not None:
                x = x * self.attention[i].clamp(max=MAX_LOG_SCALE).exp()
            if self.dropout_per_expert:
                x = dropout(x, self.dropout, self.training)
            bias = None if self.bias is None else self.bias[i]
            y = y + gate_of_expert[:, i, None].to(x.dtype) * F.linear(x, self.weight[i], bias)
        return self.log_scale.clamp(max=MAX_LOG_SCALE).exp() * y


class ReferenceRbMFeedForward(_ReferenceRouter, RbMFeedForward):
    """:class:`~rbm.nn.feed_forward.RbMFeedForward` without its operators, with equal arguments and ``state_dict``:
    every expert sees every row, and the memory moves at the end of the forward pass.
    """

    def _mixture(self, rows: Tensor, gate_of_expert: Tensor) -> Tensor:
        activate, _ = ACTIVATIONS[self.activation]
        y = rows.new_zeros(rows.shape[0], self.out_features)
        for i in range(self.num_experts):
            bias_in, bias_out = (None if b is None else b[i] for b in (self.bias_in, self.bias_out))
            hidden = dropout(activate(F.linear(rows, self.weight_in[i], bias_in)), self.dropout, self.training)
            y = y + gate_of_expert[:, i, None].to(rows.dtype) * F.linear(hidden, self.weight_out[i], bias_out)
        return y

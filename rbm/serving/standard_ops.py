"""Models in PyTorch's own operators alone: the form that leaves this package, for runtimes that do not know it.

Answers are those of the model to rounding. What a layer folds is folded once; a batch goes through all experts by one
matrix product, since only the operators of :mod:`rbm_kernels` spare those that a row does not use.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rbm.nn.feed_forward import ACTIVATIONS, RbMFeedForward
from rbm.nn.folded_weights import fold, input_scale
from rbm.nn.int8 import Int8Layer
from rbm.nn.moe import MoELayer
from rbm.nn.rbm_layer import FusedRbMLayer
from rbm_kernels.ops.int8_experts.reference import quantize, unpack


def plain(model: nn.Module) -> nn.Module:
    """A copy of any model, in eval mode and without gradients, whose mixture layers are made of standard operators.

    It takes and gives what the model does, dense and in the model's dtypes: a student's rows ``[B, in_channels]`` and
    logits ``[B, C]``. A layer that stands at several places of the model is one twin at all of them.
    """
    module = copy.deepcopy(getattr(model, "_orig_mod", model)).eval()
    twins: dict[nn.Module, nn.Module] = {}
    for parent in [*module.modules()]:
        for name, child in parent._modules.items():
            if child is not None and (kind := _kind(child)):
                if child not in twins:
                    twins[child] = kind(child)
                parent._modules[name] = twins[child]
    kind = _kind(module)
    return (kind(module) if kind else module).requires_grad_(False)


class PlainExperts(nn.Module):
    """Linear experts ``[E, N, D]`` as one matrix: ``[..., D]``, gates and experts ``[..., k]`` to ``[..., N]``."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.num_experts, self.out_features = weight.shape[:2]
        self.register_buffer("weight", weight.flatten(0, 1).detach().clone())
        self.register_buffer("bias", None if bias is None else bias.flatten().detach().clone())

    def answers(self, rows: Tensor) -> Tensor:
        """Those of all experts, ``[..., E N]``."""
        return F.linear(rows, self.weight, self.bias)

    def forward(self, rows: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        answers = self.answers(rows).unflatten(-1, (self.num_experts, self.out_features))
        # Standard runtimes scatter into a tensor that is there: zeros of the shape of all gates.
        dense_gates = torch.zeros_like(answers[..., 0]).scatter(-1, experts, gates.to(answers.dtype))
        return (dense_gates.unsqueeze(-2) @ answers).squeeze(-2)


class PlainFeedForwards(nn.Module):
    """Feed-forward experts as two matrices: ``[..., D]``, gates and experts ``[..., k]`` to ``[..., N]``."""

    def __init__(self, layer: RbMFeedForward) -> None:
        super().__init__()
        self.num_experts, self.hidden_features = layer.num_experts, layer.hidden_features
        self.activation, self.factor = ACTIVATIONS[layer.activation]
        bias_in = None if layer.bias_in is None else layer.bias_in.flatten()
        # Side by side: the product with a row's hidden features of all experts, gated, is the sum over experts.
        weight_out = layer.weight_out.permute(1, 0, 2).flatten(1)
        for name, tensor in (("weight_in", layer.weight_in.flatten(0, 1)), ("bias_in", bias_in)):
            self.register_buffer(name, None if tensor is None else tensor.detach().clone())
        self.register_buffer("weight_out", weight_out.detach().clone())
        self.register_buffer("bias_out", None if layer.bias_out is None else layer.bias_out.detach().clone())

    def forward(self, rows: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        wide = F.linear(rows, self.weight_in, self.bias_in)
        hidden = self.activation(wide.unflatten(-1, (self.num_experts, self.factor * self.hidden_features)))
        dense_gates = torch.zeros_like(hidden[..., 0]).scatter(-1, experts, gates.to(hidden.dtype))
        y = F.linear((hidden * dense_gates.unsqueeze(-1)).flatten(-2), self.weight_out)
        return y if self.bias_out is None else y + dense_gates @ self.bias_out


class PlainInt8Experts(PlainExperts):
    """Linear experts whose weights are 8-bit integers, as one matrix. Rows are rounded to whole numbers and multiplied
    in float32, which holds integers up to 2^24: beyond, sums are rounded.
    """

    def __init__(self, layer: Int8Layer) -> None:
        weight, scale, bias = unpack(layer.experts, layer.out_features, layer.in_features)
        super().__init__(weight, bias)
        self.register_buffer("scale", scale.flatten().detach().clone())

    def answers(self, rows: Tensor) -> Tensor:
        numbers, row_scale = quantize(rows)
        return F.linear(numbers, self.weight.to(numbers.dtype)) * (row_scale * self.scale) + self.bias


class PlainRbMLayer(nn.Module):
    """The answer of a layer that routes by memory (paper, Eqs. 3 and 5), ``[..., D]`` to ``[..., N]``."""

    def __init__(self, layer: FusedRbMLayer | RbMFeedForward | Int8Layer) -> None:
        super().__init__()
        self.in_features, self.out_features, self.top_k = layer.in_features, layer.out_features, layer.top_k
        self.temperature = layer.gate_temperature
        self.register_buffer("directions", F.normalize(layer.memory, dim=-1).T.contiguous())
        if isinstance(layer, RbMFeedForward):
            self.experts = PlainFeedForwards(layer)
        elif isinstance(layer, Int8Layer):
            self.experts = PlainInt8Experts(layer)
        else:
            self.experts = PlainExperts(*fold(layer.weight, layer.bias, layer.attention, layer.log_scale))

    def forward(self, rows: Tensor) -> Tensor:
        cosines = F.normalize(rows.to(self.directions.dtype), dim=-1) @ self.directions
        # A stable sort, not topk: among equal cosines, as all of an empty row are, the lower expert must win.
        nearest, experts = torch.sort(cosines, dim=-1, descending=True, stable=True)
        gates = torch.softmax(nearest[..., : self.top_k] / self.temperature, dim=-1)
        return self.experts(rows, gates, experts[..., : self.top_k])


class PlainMoELayer(nn.Module):
    """The answer of a :class:`~rbm.nn.moe.MoELayer`, ``[..., D]`` to ``[..., N]``."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.in_features, self.out_features, self.top_k = layer.in_features, layer.out_features, layer.top_k
        self.over_all = layer.gates_over == "all"
        self.router = nn.Linear(*reversed(layer.router.weight.shape))
        self.router.load_state_dict(layer.router.state_dict())
        directions = F.normalize(layer.addresses, dim=0) * input_scale(None, layer.log_temperature)
        self.register_buffer("directions", directions.detach())
        self.experts = PlainExperts(*fold(layer.weight, layer.bias, None, layer.log_scale))

    def forward(self, rows: Tensor) -> Tensor:
        logits = F.normalize(self.router(rows), dim=-1) @ self.directions
        top, experts = logits.topk(self.top_k, dim=-1)
        gates = logits.softmax(-1).gather(-1, experts) if self.over_all else top.softmax(-1)
        return self.experts(rows, gates, experts)


class PlainInt8Linear(PlainInt8Experts):
    """The answer of an :class:`~rbm.nn.int8.Int8Layer` that routes nothing, ``[..., D]`` to ``[..., N]``."""

    def forward(self, rows: Tensor) -> Tensor:
        return self.answers(rows)


def _of_int8(layer: Int8Layer) -> nn.Module:
    return PlainInt8Linear(layer) if layer.memory is None else PlainRbMLayer(layer)


_TWINS = {FusedRbMLayer: PlainRbMLayer, RbMFeedForward: PlainRbMLayer, MoELayer: PlainMoELayer, Int8Layer: _of_int8}


def _kind(module: nn.Module) -> Callable[[nn.Module], nn.Module] | None:
    """What stands in for a layer; None where it is made of standard operators."""
    return next((twin for kind, twin in _TWINS.items() if isinstance(module, kind)), None)

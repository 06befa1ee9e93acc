"""Models rewritten with PyTorch's own operators, for export to runtimes without this package.

Outputs equal the model's up to rounding. Constants are folded once. A batch goes through all experts in one matrix
product; only the operators of :mod:`rbm_kernels` skip the experts that a row does not use.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rbm.nn.feed_forward import ACTIVATIONS, RbMFeedForward
from rbm.nn.folded_weights import fold
from rbm.nn.int8 import Int8Layer
from rbm.nn.moe import MoELayer
from rbm.nn.parameters import dtype_of
from rbm.nn.rbm_layer import FusedRbMLayer
from rbm_kernels.ops.cosine_topk.reference import unit
from rbm_kernels.ops.fold_experts.reference import input_scale
from rbm_kernels.ops.int8_experts.reference import quantize, unpack


def plain(model: nn.Module) -> nn.Module:
    """A copy of a model in eval mode and without gradients, with mixture layers made of standard operators.

    Its inputs and outputs are those of the model, dense and in the model's dtypes: for a student, rows
    ``[B, in_channels]`` and logits ``[B, C]``. A layer that is shared in the model is shared in the copy.

    Raises:
        ValueError: a mixture layer is in half precision.
    """
    module = copy.deepcopy(getattr(model, "_orig_mod", model)).eval()
    replacements: dict[nn.Module, nn.Module] = {}
    for parent in [*module.modules()]:
        for name, child in parent._modules.items():
            if child is not None and (kind := _kind(child)):
                if child not in replacements:
                    replacements[child] = kind(child)
                parent._modules[name] = replacements[child]
    kind = _kind(module)
    return (kind(module) if kind else module).requires_grad_(False)


def _dense_gates(gates: Tensor, experts: Tensor, answers: Tensor) -> Tensor:
    """Gates of all experts, ``[..., E]``, zero for those that a row does not use; ``answers`` are ``[..., E, N]``."""
    # Standard runtimes scatter into an existing tensor: zeros of the shape of all gates.
    return torch.zeros_like(answers[..., 0]).scatter(-1, experts, gates.to(answers.dtype))


def _constant(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


class PlainExperts(nn.Module):
    """Linear experts ``[E, N, D]`` as one matrix: ``[..., D]``, gates and experts ``[..., k]`` to ``[..., N]``."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.num_experts, self.out_features = weight.shape[:2]
        self.register_buffer("weight", _constant(weight.flatten(0, 1)))
        self.register_buffer("bias", None if bias is None else _constant(bias.flatten()))

    def answers(self, rows: Tensor) -> Tensor:
        """Outputs of all experts, ``[..., E N]``."""
        return F.linear(rows, self.weight, self.bias)

    def forward(self, rows: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        answers = self.answers(rows).unflatten(-1, (self.num_experts, self.out_features))
        return (_dense_gates(gates, experts, answers).unsqueeze(-2) @ answers).squeeze(-2)


class PlainFeedForwards(nn.Module):
    """Feed-forward experts as two matrices: ``[..., D]``, gates and experts ``[..., k]`` to ``[..., N]``."""

    def __init__(self, layer: RbMFeedForward) -> None:
        super().__init__()
        self.num_experts, self.hidden_features = layer.num_experts, layer.hidden_features
        self.activation, self.factor = ACTIVATIONS[layer.activation]
        self.register_buffer("weight_in", _constant(layer.weight_in.flatten(0, 1)))
        self.register_buffer("bias_in", None if layer.bias_in is None else _constant(layer.bias_in.flatten()))
        # Concatenated: multiplying a row's gated hidden features of all experts gives the sum over experts.
        self.register_buffer("weight_out", _constant(layer.weight_out.permute(1, 0, 2).flatten(1)))
        self.register_buffer("bias_out", _constant(layer.bias_out))

    def forward(self, rows: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        wide = F.linear(rows, self.weight_in, self.bias_in)
        hidden = self.activation(wide.unflatten(-1, (self.num_experts, self.factor * self.hidden_features)))
        dense_gates = _dense_gates(gates, experts, hidden)
        y = F.linear((hidden * dense_gates.unsqueeze(-1)).flatten(-2), self.weight_out)
        return y if self.bias_out is None else y + dense_gates @ self.bias_out


class PlainInt8Experts(PlainExperts):
    """Linear experts with 8-bit integer weights, as one matrix.

    Rows are rounded to whole numbers and multiplied in float32, which is exact for integers up to 2^24; larger sums are
    rounded.
    """

    def __init__(self, layer: Int8Layer) -> None:
        weight, scale, bias = unpack(layer.experts, layer.out_features, layer.in_features)
        super().__init__(weight, bias)
        self.register_buffer("scale", _constant(scale.flatten()))

    def answers(self, rows: Tensor) -> Tensor:
        numbers, row_scale = quantize(rows)
        return F.linear(numbers, self.weight.to(numbers.dtype)) * (row_scale * self.scale) + self.bias


class PlainRbMLayer(nn.Module):
    """A layer that routes by memory vectors (paper, Eqs. 3 and 5), ``[..., D]`` to ``[..., N]``."""

    def __init__(self, layer: FusedRbMLayer | RbMFeedForward | Int8Layer) -> None:
        super().__init__()
        self.in_features, self.out_features, self.top_k = layer.in_features, layer.out_features, layer.top_k
        self.temperature = layer.gate_temperature
        self.register_buffer("directions", unit(layer.memory).T.contiguous())
        if isinstance(layer, RbMFeedForward):
            self.experts = PlainFeedForwards(layer)
        elif isinstance(layer, Int8Layer):
            self.experts = PlainInt8Experts(layer)
        else:
            self.experts = PlainExperts(*fold(layer.weight, layer.bias, layer.attention, layer.log_scale))

    def forward(self, rows: Tensor) -> Tensor:
        cosines = unit(rows.to(self.directions.dtype)) @ self.directions
        # A stable sort instead of topk: among equal cosines (all of them for an empty row), the lower expert must win.
        nearest, experts = torch.sort(cosines, dim=-1, descending=True, stable=True)
        gates = torch.softmax(nearest[..., : self.top_k] / self.temperature, dim=-1)
        return self.experts(rows, gates, experts[..., : self.top_k])


class PlainMoELayer(nn.Module):
    """A :class:`~rbm.nn.moe.MoELayer`, ``[..., D]`` to ``[..., N]``."""

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
    """An :class:`~rbm.nn.int8.Int8Layer` without routing, ``[..., D]`` to ``[..., N]``."""

    def forward(self, rows: Tensor) -> Tensor:
        return self.answers(rows)


def _of_int8(layer: Int8Layer) -> nn.Module:
    return PlainInt8Linear(layer) if layer.memory is None else PlainRbMLayer(layer)


_REPLACEMENTS = {
    FusedRbMLayer: PlainRbMLayer,
    RbMFeedForward: PlainRbMLayer,
    MoELayer: PlainMoELayer,
    Int8Layer: _of_int8,
}


def _kind(module: nn.Module) -> Callable[[nn.Module], nn.Module] | None:
    """The class that replaces a layer; None if the layer already consists of standard operators.

    Raises:
        ValueError: the layer is in half precision, which the operators do not accumulate in: rounded otherwise, cosines
            that are nearly equal would route rows to other experts.
    """
    found = next((replacement for kind, replacement in _REPLACEMENTS.items() if isinstance(module, kind)), None)
    if found is not None and (dtype := dtype_of(module)) not in (torch.float32, torch.float64):
        raise ValueError(
            f"model has a {type(module).__name__} in {dtype}, expected float32 or float64: standard operators round"
            " half precision otherwise, which moves rows to other experts; export a copy in float32 (model.float())"
        )
    return found

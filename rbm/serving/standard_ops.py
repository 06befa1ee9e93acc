"""Students in PyTorch's own operators alone: the form that leaves this package, for runtimes that do not know it.

Answers are those of the student to rounding. What a layer folds is folded once; a batch goes through all experts by one
matrix product, since only the operators of :mod:`rbm_kernels` spare those that a row does not use.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rbm.nn.folded_weights import fold, input_scale
from rbm.nn.moe import MoELayer
from rbm.nn.rbm_layer import FusedRbMLayer


def plain(student: nn.Module) -> nn.Module:
    """A copy of a student, in eval mode and without gradients, whose mixture layers are made of standard operators.

    It takes dense rows ``[B, in_channels]``, floating in the dtype of the student, and gives logits ``[B, C]``.
    """
    module = copy.deepcopy(student).eval()
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            for kind, twin in _TWINS.items():
                if isinstance(child, kind):
                    setattr(parent, name, twin(child))
    return module.requires_grad_(False)


class PlainExperts(nn.Module):
    """Linear experts ``[E, N, D]`` as one matrix: ``[..., D]``, gates and experts ``[..., k]`` to ``[..., N]``."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.num_experts, self.out_features = weight.shape[:2]
        self.register_buffer("weight", weight.flatten(0, 1).detach().clone())
        self.register_buffer("bias", None if bias is None else bias.flatten().detach().clone())

    def forward(self, rows: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        answers = F.linear(rows, self.weight, self.bias).unflatten(-1, (self.num_experts, self.out_features))
        # Standard runtimes scatter into a tensor that is there: zeros of the shape of all gates.
        everyone = torch.zeros_like(answers[..., 0]).scatter(-1, experts, gates.to(answers.dtype))
        return (everyone.unsqueeze(-2) @ answers).squeeze(-2)


class PlainRbMLayer(nn.Module):
    """The answer of a :class:`~rbm.nn.rbm_layer.FusedRbMLayer` (paper, Eqs. 3 and 5), ``[..., D]`` to ``[..., N]``."""

    def __init__(self, layer: FusedRbMLayer) -> None:
        super().__init__()
        self.in_features, self.out_features, self.top_k = layer.in_features, layer.out_features, layer.top_k
        self.temperature = layer.gate_temperature
        self.register_buffer("directions", F.normalize(layer.memory, dim=-1).T.contiguous())
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


_TWINS = {FusedRbMLayer: PlainRbMLayer, MoELayer: PlainMoELayer}

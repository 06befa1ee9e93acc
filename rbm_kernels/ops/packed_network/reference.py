"""Definition of a packed network in plain eager PyTorch. Its packed weights have the format of the reference of
``packed_experts``, not that of ``librbm_cpu``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from rbm_kernels.ops.cosine_topk.reference import all_cosines
from rbm_kernels.ops.expert_matmul.reference import dense_gates
from rbm_kernels.ops.int8_experts import reference as int8
from rbm_kernels.ops.packed_experts import reference as packed_experts
from rbm_kernels.ops.packed_network.form import INT8, NORMS, NOWHERE, NetworkLayer, StoredLayer, part, read, write


def pack_network(layers: Sequence[NetworkLayer]) -> Tensor:
    """Uint8 ``[S]`` for layers that were already checked."""
    return write(layers, packed_experts.pack_experts)


def packed_network(x: Tensor, network: Tensor) -> Tensor:
    """``y [B, N]`` for the rows ``x [B, D]``, layer by layer."""
    for layer in read(network):
        x = _answer(x, network, layer)
    return x


def _answer(x: Tensor, network: Tensor, layer: StoredLayer) -> Tensor:
    e, n, d = layer.num_experts, layer.outputs, layer.inputs
    if layer.weights == INT8:
        lines = int8.HEAD - (-d // int8.GROUP)
        panels = part(network, layer.experts, (e, -(-n // int8.COLUMNS), lines, int8.LINE), torch.int8)
        weight, scale, bias = int8.unpack(panels, n, d)
        numbers, row_scale = int8.quantize(x)
        sums = torch.einsum("bd,end->ben", numbers.double(), weight.double()).float()
        answers = sums * (row_scale[:, :, None] * scale) + bias
    else:
        weight, bias = _linear(network, layer.experts, (e, n, d))
        answers = torch.einsum("bd,end->ben", x, weight) + bias
    y = (_gates(x, network, layer)[:, :, None] * answers).sum(1)
    if layer.norm != NORMS.index("none"):
        scale, shift = (part(network, offset, (n,), torch.float32) for offset in (layer.scale, layer.shift))
        is_layer = layer.norm == NORMS.index("layer")
        y = F.layer_norm(y, (n,), scale, shift, layer.eps) if is_layer else y * scale + shift
    if layer.activates:
        y = F.leaky_relu(y, layer.negative_slope) if layer.negative_slope != 0 else y.relu()
    if layer.adds_input:
        y = y + x
    return F.normalize(y, dim=-1) if layer.is_unit else y


def _gates(x: Tensor, network: Tensor, layer: StoredLayer) -> Tensor:
    """Gates of all experts, ``[B, E]``; zero if a row does not use the expert."""
    if layer.memory == NOWHERE:
        return x.new_ones(x.shape[0], 1)
    if layer.router != NOWHERE:
        weight, bias = _linear(network, layer.router, (1, layer.router_features, layer.inputs))
        x = F.linear(x, weight[0], bias[0])
    memory = part(network, layer.memory, (layer.num_experts, layer.router_features), torch.float32)
    # A stable sort, not topk: among equal cosines the lower expert must win.
    cosines, experts = torch.sort(all_cosines(x, memory), dim=-1, descending=True, stable=True)
    if not layer.over_all:
        cosines = cosines[:, : layer.top_k]
    gates = torch.softmax(cosines / layer.temperature, dim=-1)[:, : layer.top_k]
    return dense_gates(gates, experts[:, : layer.top_k], layer.num_experts)


def _linear(network: Tensor, offset: int, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Weight ``[E, N, D]`` and bias ``[E, N]``."""
    e, n, d = shape
    packed = part(network, offset, (e, d + 1, n), torch.float32)
    return packed[:, 1:].transpose(1, 2), packed[:, 0]

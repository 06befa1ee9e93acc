"""Format of a packed network: a sequence of bytes, a header and then its parts. Read by ``csrc/cpu/network_form.h``."""

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MARK = 0x33574E4D4252
NOWHERE = -1
ALIGNMENT = 64
NORMS = ("none", "affine", "layer")
FLOAT32, INT8 = 0, 1


class NetworkLayer(NamedTuple):
    """One layer: linear, or a mixture of linear experts; then, in this order, a norm, ReLU, the layer's input, and rows
    of unit length.

    Attributes:
        weight: ``[E, N, D]``, float32; or int8, the result of :func:`rbm_kernels.quantize_experts`, which includes the
            bias.
        bias: ``[E, N]``, or None.
        out_features: ``N``.
        in_features: ``D``.
        memory: ``[E, R]``, the memory vectors used for routing (paper, Eq. 3); or None if ``E`` is 1.
        k: experts per row.
        temperature: divides the cosines before the softmax.
        router: weight ``[R, D]`` and bias ``[R]`` of a linear map whose outputs are used for routing; or None if rows
            are routed directly (``R`` is ``D``).
        over_all: whether the softmax of the gates runs over all experts instead of the row's own.
        norm: ``none``; ``affine``, ``scale * y + shift``; ``layer``, :func:`torch.nn.functional.layer_norm`.
        scale, shift: ``[N]``, parameters of the norm.
        eps: of the norm ``layer``.
        relu: whether ReLU follows the norm.
        negative_slope: what ReLU multiplies negative numbers by (a leaky ReLU, or a PReLU with one slope).
        residual: whether the layer's input is added after ReLU; ``N`` is ``D``.
        unit: whether rows are divided by their lengths at the end, as by :func:`torch.nn.functional.normalize`.
    """

    weight: Tensor
    bias: Tensor | None
    out_features: int
    in_features: int
    memory: Tensor | None = None
    k: int = 1
    temperature: float = 1.0
    router: tuple[Tensor, Tensor | None] | None = None
    over_all: bool = False
    norm: str = "none"
    scale: Tensor | None = None
    shift: Tensor | None = None
    eps: float = 0.0
    relu: bool = False
    negative_slope: float = 0.0
    residual: bool = False
    unit: bool = False


class StoredLayer(NamedTuple):
    """Header of a layer: sizes, and the offsets of its parts."""

    weights: int
    inputs: int
    outputs: int
    num_experts: int
    top_k: int
    router_features: int
    over_all: int
    norm: int
    activates: int
    adds_input: int
    is_unit: int
    is_finite: int
    temperature: float
    eps: float
    negative_slope: float
    experts: int
    memory: int
    router: int
    scale: int
    shift: int


_HEAD, _LAYER = struct.Struct("=2q"), struct.Struct("=12q3d5q")


def write(layers: Sequence[NetworkLayer], pack: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
    """The bytes (uint8) of checked layers, on their device. ``pack`` packs float32 weights."""
    parts: list[tuple[int, Tensor]] = []
    begin = -(-(_HEAD.size + _LAYER.size * len(layers)) // ALIGNMENT) * ALIGNMENT
    end = begin

    def add(tensor: Tensor | None) -> int:
        nonlocal end
        if tensor is None:
            return NOWHERE
        first = end
        parts.append((first, tensor.detach().contiguous().view(-1).view(torch.uint8)))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return first

    head = _HEAD.pack(MARK, len(layers))
    for layer in layers:
        is_int8 = layer.weight.dtype == torch.int8
        router = None if layer.router is None else [None if t is None else t[None] for t in layer.router]
        head += _LAYER.pack(
            *StoredLayer(
                weights=INT8 if is_int8 else FLOAT32,
                inputs=layer.in_features,
                outputs=layer.out_features,
                num_experts=layer.weight.shape[0],
                top_k=layer.k,
                router_features=layer.in_features if layer.router is None else layer.router[0].shape[0],
                over_all=layer.over_all,
                norm=NORMS.index(layer.norm),
                activates=layer.relu,
                adds_input=layer.residual,
                is_unit=layer.unit,
                is_finite=not is_int8 and _are_finite(layer.weight, *(layer.router or ())),
                temperature=layer.temperature,
                eps=layer.eps,
                negative_slope=layer.negative_slope,
                experts=add(layer.weight if is_int8 else pack(layer.weight, layer.bias)),
                memory=add(layer.memory),
                router=add(None if router is None else pack(*router)),
                scale=add(layer.scale),
                shift=add(layer.shift),
            )
        )
    network = torch.empty(end, dtype=torch.uint8, device=layers[0].weight.device)
    network[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    while parts:
        first, part = parts.pop()
        network[first : first + len(part)] = part
    return network


def _are_finite(*weights: Tensor | None) -> bool:
    return all(weight is None or bool(weight.isfinite().all()) for weight in weights)


def read(network: Tensor) -> list[StoredLayer]:
    """The headers of the layers. Raises ValueError if these are not the bytes of a network."""
    head = bytes(network[: _HEAD.size].tolist())
    mark, count = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
    end = _HEAD.size + count * _LAYER.size
    if mark != MARK or count < 1 or end > len(network):
        raise ValueError(
            "rbm::packed_network: network begins with other bytes, expected what pack_network returned: pack it anew"
        )
    return [StoredLayer(*fields) for fields in _LAYER.iter_unpack(bytes(network[_HEAD.size : end].tolist()))]


def part(network: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The part of the given shape that starts at ``offset``."""
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    return network[offset : offset + size].view(dtype).view(shape)

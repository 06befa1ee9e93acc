"""What a network is packed into: one run of bytes, a head and then its parts. ``csrc/cpu/network_form.h`` reads it."""

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MARK = 0x31574E4D4252
NOWHERE = -1
ALIGNMENT = 64
NORMS = ("none", "affine", "layer")
FLOAT32, INT8 = 0, 1


class NetworkLayer(NamedTuple):
    """One layer: linear, or a mixture of linear experts; then a norm, then ReLU.

    Attributes:
        weight: ``[E, N, D]``, float32; or int8, as :func:`rbm_kernels.quantize_experts` returned it, the bias in it.
        bias: ``[E, N]``, or None.
        out_features: ``N``.
        in_features: ``D``.
        memory: ``[E, R]``, the memory vectors that rows are routed by (paper, Eq. 3); or None, where ``E`` is 1.
        k: experts a row uses.
        temperature: divides the cosines before the softmax.
        router: weight ``[R, D]`` and bias ``[R]`` of a linear map, where rows are routed by what it makes of them; or
            None, where ``R`` is ``D``.
        over_all: whether gates are shares of a softmax over all experts, and not over the row's.
        norm: ``none``; ``affine``, ``scale * y + shift``; ``layer``, :func:`torch.nn.functional.layer_norm`.
        scale, shift: ``[N]``, of the norm.
        eps: of ``layer``.
        relu: whether ReLU ends the layer.
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


class StoredLayer(NamedTuple):
    """The head of a layer: sizes, and where in the bytes its parts begin."""

    weights: int
    inputs: int
    outputs: int
    num_experts: int
    top_k: int
    router_features: int
    over_all: int
    norm: int
    activates: int
    temperature: float
    eps: float
    experts: int
    memory: int
    router: int
    scale: int
    shift: int


_HEAD, _LAYER = struct.Struct("=2q"), struct.Struct("=9q2d5q")


def write(layers: Sequence[NetworkLayer], pack: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
    """The bytes of checked layers, uint8, on their device. ``pack`` is what float32 weights are packed by."""
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
                temperature=layer.temperature,
                eps=layer.eps,
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


def read(network: Tensor) -> list[StoredLayer]:
    """The heads of the layers; ValueError for other bytes."""
    head = bytes(network[: _HEAD.size].tolist())
    mark, count = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
    end = _HEAD.size + count * _LAYER.size
    if mark != MARK or count < 1 or end > len(network):
        raise ValueError(
            "rbm::packed_network: network begins with other bytes, expected what pack_network returned: pack it anew"
        )
    return [StoredLayer(*fields) for fields in _LAYER.iter_unpack(bytes(network[_HEAD.size : end].tolist()))]


def part(network: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The part of that shape that begins at ``offset``."""
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    return network[offset : offset + size].view(dtype).view(shape)

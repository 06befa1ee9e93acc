"""``torch.ops.rbm.packed_network``: schema, checks, fake implementation; packing of its networks."""

import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from rbm_kernels import checks
from rbm_kernels._library import LIBRARY, implement_everywhere, implement_fake, inference_call, refuse_derivative
from rbm_kernels._vmap import implement_vmap
from rbm_kernels.ops.int8_experts.op import check_features
from rbm_kernels.ops.int8_experts.reference import COLUMNS, GROUP, HEAD, LINE
from rbm_kernels.ops.packed_experts import pack_experts
from rbm_kernels.ops.packed_network import reference
from rbm_kernels.ops.packed_network.form import NORMS, NetworkLayer, read, write

# Without pt2_compliant_tag, which would allow it in compiled graphs: the packed format depends on the processor.
LIBRARY.define("packed_network(Tensor x, Tensor network, int out_features) -> Tensor")


@torch.no_grad()
def pack_network(layers: Sequence[NetworkLayer]) -> Tensor:
    """Pack a network for :func:`packed_network`, in this process, on the device of its weights.

    The result is a copy, in a format that depends on the vector width of this processor: keep it in memory, never in a
    file, and pack again after a change.

    Args:
        layers: in order; each takes the output of the previous one. All tensors are float32, except int8 weights.

    Returns:
        uint8 ``[S]``.

    Raises:
        TypeError: another dtype, or a part of a layer of another type.
        ValueError: no layers; sizes that are zero or do not match, ``k`` or a temperature out of range, or an
            unknown norm.
    """
    if not isinstance(layers, Sequence) or isinstance(layers, str | NetworkLayer):
        raise TypeError(f"rbm::pack_network: layers is a {type(layers).__name__}, expected a list of NetworkLayer")
    if not layers:
        raise ValueError("rbm::pack_network: layers is empty, expected at least one")
    for i, layer in enumerate(layers):
        _check_types(f"layers[{i}]", layer)
        _check_layer(f"layers[{i}]", layer, layers[i - 1] if i else None)
    return write(layers, pack_experts)


def packed_network(x: Tensor, network: Tensor, out_features: int) -> Tensor:
    """Run rows through all layers of a packed network, in one call.

    For inference on the CPU, if the weights do not change between calls. The GIL is released once. A row's result is
    the same, bit for bit, in every batch and for any number of threads.

    Args:
        x: rows ``[B, D]``, float32. ``B`` may be 0.
        network: result of :func:`pack_network`.
        out_features: ``N``, the number of outputs of the last layer.

    Returns:
        ``y [B, N]``, float32.

    Raises:
        TypeError: another dtype.
        ValueError: shapes that do not match, tensors on different devices, or ``network`` is not a packed network.
        RuntimeError: a gradient is needed (gradients are enabled, and an argument requires one); or ``network`` was
            packed on another processor, or is only a part of a packed network.
    """
    return _call(x, network, out_features)


def _check_types(name: str, layer: NetworkLayer) -> None:
    """Raise TypeError unless the parts of a layer that are no tensors have their types."""
    if not isinstance(layer, NetworkLayer):
        raise TypeError(f"rbm::pack_network: {name} is a {type(layer).__name__}, expected a NetworkLayer")
    number, whole, flag = (numbers.Real, "a number"), (numbers.Integral, "a whole number"), (bool, "True or False")
    types = dict.fromkeys(("out_features", "in_features", "k"), whole)
    types |= dict.fromkeys(("over_all", "relu", "residual", "unit"), flag)
    for part, (kind, expected) in (types | dict.fromkeys(("temperature", "eps", "negative_slope"), number)).items():
        if not isinstance(value := getattr(layer, part), kind):
            raise TypeError(f"rbm::pack_network: {name}.{part} is {value!r}, expected {expected}")
    if layer.router is not None and not (isinstance(layer.router, tuple) and len(layer.router) == 2):
        kind = type(layer.router).__name__
        raise TypeError(f"rbm::pack_network: {name}.router is a {kind}, expected None or a pair of weight and bias")


def _check_layer(name: str, layer: NetworkLayer, before: NetworkLayer | None) -> None:
    op, n, d = "pack_network", layer.out_features, layer.in_features
    if min(n, d) < 1:
        raise ValueError(f"rbm::{op}: {name} is from {d} features to {n}, expected at least 1 of either")
    if before is not None and before.out_features != d:
        raise ValueError(f"rbm::{op}: {name} takes {d} features, expected {before.out_features}, the outputs before it")
    if layer.residual and n != d:
        raise ValueError(f"rbm::{op}: {name}.residual is True, expected False from {d} features to {n}")
    checks.check_dtype(op, f"{name}.weight", layer.weight, (torch.float32, torch.int8))
    if layer.weight.dtype == torch.int8:
        check_features(op, name, d)
        shape = (None, -(-n // COLUMNS), HEAD - (-d // GROUP), LINE)
        checks.check_shape(op, f"{name}.weight", layer.weight, shape, "what quantize_experts returned")
        if layer.bias is not None:
            raise ValueError(f"rbm::{op}: {name}.bias is a tensor, expected None: int8 weights hold the bias")
    else:
        checks.check_shape(op, f"{name}.weight", layer.weight, (None, n, d), "experts by outputs by features")
    experts = layer.weight.shape[0]
    checks.check_num_experts(op, experts)
    shapes = {"bias": (layer.bias, (experts, n)), "scale": (layer.scale, (n,)), "shift": (layer.shift, (n,))}
    features = d
    if layer.router is not None:
        checks.check_dtype(op, f"{name}.router[0]", layer.router[0], (torch.float32,))
        features = layer.router[0].shape[0]
        shapes |= {"router[0]": (layer.router[0], (features, d)), "router[1]": (layer.router[1], (features,))}
    shapes["memory"] = (layer.memory, (experts, features))
    for part, (tensor, shape) in shapes.items():
        if tensor is not None:
            checks.check_dtype(op, f"{name}.{part}", tensor, (torch.float32,))
            checks.check_shape(op, f"{name}.{part}", tensor, shape, "as the layer's sizes say")
    checks.check_top_k(op, layer.k, experts)
    if layer.memory is None and (experts > 1 or layer.router is not None):
        raise ValueError(f"rbm::{op}: {name}.memory is None, expected [{experts}, {features}], to route rows by")
    checks.check_temperature(op, f"{name}.temperature", layer.temperature, torch.float32)
    if layer.norm not in NORMS:
        raise ValueError(f"rbm::{op}: {name}.norm is {layer.norm!r}, expected one of {', '.join(NORMS)}")
    if layer.norm != "none" and (layer.scale is None or layer.shift is None):
        raise ValueError(f"rbm::{op}: {name}.norm is {layer.norm!r} without scale or shift, expected [{n}] of either")


def _check_tensors(x: Tensor, network: Tensor) -> None:
    op = "packed_network"
    checks.check_dtype(op, "x", x, (torch.float32,))
    checks.check_shape(op, "x", x, (None, None), "rows by features")
    checks.check_dtype(op, "network", network, (torch.uint8,))
    checks.check_shape(op, "network", network, (None,), "what pack_network returned")


def _check(x: Tensor, network: Tensor, out_features: int) -> None:
    _check_tensors(x, network)
    op, layers = "packed_network", read(network)
    checks.check_shape(op, "x", x, (None, layers[0].inputs), "rows by the network's features")
    if out_features != layers[-1].outputs:
        raise ValueError(f"rbm::{op}: out_features is {out_features}, expected {layers[-1].outputs}, the network's")


@implement_everywhere("packed_network")
def _eager(x, network, out_features) -> Tensor:
    _check(x, network, out_features)
    return reference.packed_network(x, network)


def _fake(x, network, out_features) -> Tensor:
    _check_tensors(x, network)
    return x.new_empty((x.shape[0], out_features))


implement_fake("packed_network", _fake)
refuse_derivative("packed_network", "routed_matmul")
_call = inference_call("packed_network", _check, refuses=True)
implement_vmap("packed_network", rows=("x",))

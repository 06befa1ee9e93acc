"""Operations of :func:`rbm_kernels.packed_network`."""

from torch import Tensor

from rbm_kernels.ops.packed_network.form import NOWHERE, StoredLayer, read


def _counted(x, network, *_, **__) -> int:
    """The sum over the layers. Sizes are in the bytes of the network: without any (meta, fake tensors) it is zero."""
    has_bytes = type(network) is Tensor and not network.is_meta
    return x.shape[0] * sum(map(_of_a_row, read(network))) if has_bytes else 0


def _of_a_row(layer: StoredLayer) -> int:
    """Products with experts; then, if the layer routes, with memory vectors, and of the router before them."""
    products = layer.top_k * layer.inputs * layer.outputs
    if layer.memory != NOWHERE:
        products += layer.num_experts * layer.router_features
    if layer.router != NOWHERE:
        products += layer.inputs * layer.router_features
    return 2 * products


FLOP_FORMULAS = {"packed_network": _counted}

"""All layers of a network with packed weights in one call, used by a student that serves on the CPU."""

from rbm_kernels.ops.packed_network.form import NetworkLayer
from rbm_kernels.ops.packed_network.op import pack_network, packed_network

__all__ = ["NetworkLayer", "pack_network", "packed_network"]

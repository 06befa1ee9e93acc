"""All layers of a network of packed weights in one call: what a student that serves on a CPU keeps."""

from rbm_kernels.ops.packed_network.form import NetworkLayer
from rbm_kernels.ops.packed_network.op import pack_network, packed_network

__all__ = ["NetworkLayer", "pack_network", "packed_network"]

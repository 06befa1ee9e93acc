"""Kernels for Routing-by-Memory: PyTorch operators that do not depend on graphs.

========================  =======================================================================
``cosine_topk``           route rows to the k memory vectors nearest in cosine similarity
``expert_order``          sort rows by their set of experts
``expert_matmul``         send each row through its own experts, weighted by its gates
``sparse_expert_matmul``  the same for rows in compressed sparse form
``routed_matmul``         ``cosine_topk`` and ``expert_matmul`` in one call, for inference
``routed_matmul_packed``  the same with prepacked experts (``pack_experts``), on the CPU
``routed_matmul_int8``    the same with 8-bit integer experts (``quantize_experts``)
``packed_feed_forward``   a layer of prepacked feed-forward experts in one call, on the CPU
``packed_network``        all layers of a network in one call (``pack_network``), for serving on the CPU
``fold_experts``          multiply the experts' attention and scale into their weights
``memory_update_``        move the memory vectors towards the rows routed to them
                          (call ``memory_statistics`` first)
========================  =======================================================================

All of them are ``torch.ops.rbm.*`` operators: they trace with ``torch.compile(fullgraph=True)``, can be exported, and
never synchronise with the host. The device of the arguments selects the implementation. Operators with packed weights
do not trace: their format depends on the processor. On a GPU, ``packed_network`` reads its sizes from the device. Pack
and quantise weights outside of traced functions.

Kernels compute first-order reverse-mode derivatives. Higher-order derivatives, forward mode and the ``torch.func``
transforms use the same formulas in eager PyTorch, at ``E / k`` times the work. ``vmap`` passes the rows of all slices
to one call of an operator, also in the backward pass; if anything but rows is batched, such as weights, each slice has
its own call. The choice of experts is treated as constant.
"""

from rbm_kernels import _flop_counter, _library, _native
from rbm_kernels.ops.cosine_topk import cosine_topk
from rbm_kernels.ops.expert_matmul import expert_matmul
from rbm_kernels.ops.expert_order import ExpertOrder, expert_order
from rbm_kernels.ops.fold_experts import fold_experts
from rbm_kernels.ops.int8_experts import quantize_experts, routed_matmul_int8
from rbm_kernels.ops.memory_update import memory_statistics, memory_update_
from rbm_kernels.ops.packed_experts import pack_experts, routed_matmul_packed
from rbm_kernels.ops.packed_feed_forward import packed_feed_forward
from rbm_kernels.ops.packed_network import NetworkLayer, pack_network, packed_network
from rbm_kernels.ops.routed_matmul import routed_matmul
from rbm_kernels.ops.sparse_expert_matmul import sparse_expert_matmul, sparse_expert_matmul_backward_weight

_native.load()
_library.bind_stand_ins()
_flop_counter.register_when_imported()

__version__ = "0.1.0"

__all__ = [
    "ExpertOrder",
    "NetworkLayer",
    "cosine_topk",
    "expert_matmul",
    "expert_order",
    "fold_experts",
    "memory_statistics",
    "memory_update_",
    "pack_experts",
    "pack_network",
    "packed_feed_forward",
    "packed_network",
    "quantize_experts",
    "routed_matmul",
    "routed_matmul_int8",
    "routed_matmul_packed",
    "sparse_expert_matmul",
    "sparse_expert_matmul_backward_weight",
]

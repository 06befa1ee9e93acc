"""Routing: the cosines of each row with all memory vectors, the k largest, and a softmax over them."""

from rbm_kernels.ops.cosine_topk.op import cosine_topk

__all__ = ["cosine_topk"]

"""Routing: the cosine of each row with each memory vector, the k largest, and a softmax over them."""

from rbm_kernels.ops.cosine_topk.op import cosine_topk

__all__ = ["cosine_topk"]

"""Routing: the cosine of each row with each memory vector, the k largest, and a softmax over them."""

from .op import cosine_topk

__all__ = ["cosine_topk"]

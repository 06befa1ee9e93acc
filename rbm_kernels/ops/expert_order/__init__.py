"""Rows sorted by their set of experts, and the experts that each tile of ordered rows needs."""

from rbm_kernels.ops.expert_order.op import ExpertOrder, expert_order, pass_columns

__all__ = ["ExpertOrder", "expert_order", "pass_columns"]

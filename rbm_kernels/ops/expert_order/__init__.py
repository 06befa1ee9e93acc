"""Rows put in order of their expert set, and for each tile of ordered rows the experts it needs."""

from rbm_kernels.ops.expert_order.op import ExpertOrder, expert_order, pass_columns

__all__ = ["ExpertOrder", "expert_order", "pass_columns"]

"""The moving average by which memory vectors follow the rows routed to them."""

from rbm_kernels.ops.memory_update.op import memory_statistics, memory_update_

__all__ = ["memory_statistics", "memory_update_"]

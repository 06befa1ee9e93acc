"""The moving average by which the memory vectors follow the rows that were routed to them."""

from rbm_kernels.ops.memory_update.op import memory_statistics, memory_update_

__all__ = ["memory_statistics", "memory_update_"]

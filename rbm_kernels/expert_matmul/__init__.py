"""Each row through its own experts: grouped, gate-weighted matmul."""

from .op import expert_matmul

__all__ = ["expert_matmul"]

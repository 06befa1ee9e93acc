"""Minimum cost of an operator: bytes that must be moved and operations that must be done, from shapes alone.

The folder of each operator that has GPU kernels has a ``cost.py`` with its formulas. They are lower bounds for any
kernel: each input is read from device memory once, each output is written once, and only what the mathematics requires
is computed. The time above this bound is what an implementation loses.

If an operator multiplies matrices, its ``cost.py`` has ``FLOP_FORMULAS`` too, for PyTorch's ``FlopCounterMode``
(:mod:`rbm_kernels._flop_counter`). These take the operator's arguments, and count products of matrices alone, as
PyTorch does: ``2 M N K`` each.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Bytes to and from device memory, and floating-point operations. A multiply-add counts as two operations."""

    bytes: int
    flops: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops)

    def roofline_seconds(self, bandwidth: float, flops_per_second: float) -> float:
        """Minimum time at ``bandwidth`` bytes and ``flops_per_second``: the longer of the two, because they overlap."""
        return max(self.bytes / bandwidth, self.flops / flops_per_second)

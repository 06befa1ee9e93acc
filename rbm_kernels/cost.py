"""The least cost of an operator: bytes that must move and operations that must be done, from shapes alone.

Every operator's folder has a ``cost.py`` with its formulas. They are floors for any kernel: each input
is read from device memory once, each output written once, and only what the mathematics needs is computed. Time over
the floor is what an implementation loses.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Bytes to and from device memory, and floating-point operations, a multiply-add counted as two."""

    bytes: int
    flops: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops)

    def roofline_seconds(self, bandwidth: float, flops_per_second: float) -> float:
        """The least time at ``bandwidth`` bytes and ``flops_per_second``: the longer of the two, which overlap."""
        return max(self.bytes / bandwidth, self.flops / flops_per_second)

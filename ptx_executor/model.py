"""A model of what limits a kernel: counters divided by the throughput of a multiprocessor. It does not predict time.

Each resource is assumed to be always busy. Dependencies, latencies, caches and the order of instructions are ignored,
and so are wgmma's own reads of shared memory. So the largest value is a lower bound for the cycles, and shows which
resource would have to do less.

Sources: throughputs per cycle and multiprocessor from the CUDA C++ Programming Guide, "Arithmetic Instructions"; tensor
cores and memory from NVIDIA's whitepapers of A100 and H100 (SXM): dense rates divided by clock and multiprocessors.
"""

from dataclasses import dataclass

from ptx_executor.counters import Counters


@dataclass(frozen=True)
class Multiprocessor:
    """Throughput of a multiprocessor per cycle.

    Attributes:
        integer, floating, special: warp instructions.
        multiply_adds: of tensor cores with 16-bit operands; TF32 has half of this.
        l2_bytes: between a multiprocessor and the L2 cache.
    """

    integer: float
    floating: float
    special: float
    multiply_adds: int
    l2_bytes: int

    issued: float = 4
    wavefronts: float = 1


# A100 and H100.
MULTIPROCESSORS = {
    80: Multiprocessor(integer=2, floating=2, special=0.5, multiply_adds=1024, l2_bytes=64),
    90: Multiprocessor(integer=2, floating=4, special=0.5, multiply_adds=2048, l2_bytes=64),
}


def cycles(counters: Counters, architecture: int, *, tf32: bool = False) -> dict[str, float]:
    """For each resource, the cycles for which a block keeps it busy on one multiprocessor."""
    unit, kinds = MULTIPROCESSORS[architecture], counters.instructions
    busy = {
        "issue": counters.executed / unit.issued,
        "integer": (kinds["integer"] + kinds["predicate"]) / unit.integer,
        "float": kinds["float"] / unit.floating,
        "special": kinds["special"] / unit.special,
        "tensor cores": counters.multiply_adds / (unit.multiply_adds / 2 if tf32 else unit.multiply_adds),
        "shared memory": counters.wavefronts / unit.wavefronts,
        "L2": 32 * counters.sectors / unit.l2_bytes,
    }
    return {resource: total / counters.blocks for resource, total in busy.items()}


def bound(busy: dict[str, float]) -> tuple[str, float]:
    """The resource that is busy longest, and its cycles."""
    return max(busy.items(), key=lambda item: item[1])

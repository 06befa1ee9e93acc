"""Statistics of a launch: instructions by class, memory requests and their traffic, in total and by source line."""

from collections import Counter
from dataclasses import dataclass, field

from ptx_executor.program import Result

# Statements that access memory. A cp.async counts for both.
_GLOBAL, _SHARED = ("global", "copy"), ("shared", "copy")


@dataclass(frozen=True)
class Counters:
    """Sums over the blocks that ran.

    Attributes:
        blocks: number of blocks that ran.
        instructions: warp instructions for each class of :attr:`ptx_executor.program.Program.classes`.
        global_requests: warp instructions that accessed global memory; ``sectors``: 32-byte sectors that they moved.
        shared_requests: warp instructions that accessed shared memory; ``wavefronts``: passes over its 32 banks.
        multiply_adds: multiply-adds of matrix instructions.
    """

    blocks: int
    instructions: Counter[str] = field(default_factory=Counter)
    global_requests: int = 0
    sectors: int = 0
    shared_requests: int = 0
    wavefronts: int = 0
    multiply_adds: int = 0

    @property
    def executed(self) -> int:
        """Warp instructions of all classes."""
        return sum(self.instructions.values())


def count(result: Result) -> Counters:
    """Sums over all instructions of a launch."""
    return _sum(result, range(len(result.counts)))


def count_lines(result: Result) -> dict[tuple[str, int], Counters]:
    """Sums by source file and line, the most executed first."""
    places: dict[tuple[str, int], list[int]] = {}
    for place, statement in enumerate(result.program.kernel.statements):
        if statement.source is not None:
            places.setdefault(statement.source, []).append(place)
    lines = {source: _sum(result, chosen) for source, chosen in places.items()}
    return dict(sorted(lines.items(), key=lambda item: -item[1].executed))


def count_main_loop(result: Result) -> tuple[Counters, int]:
    """Sums over the innermost loop with the most multiply-adds (else the most executed), and its iterations, by warps.

    Both are zero if there is no loop.
    """
    kernel, executed, multiply_adds = result.program.kernel, result.column("executed"), result.column("multiply_adds")
    loops = [
        (kernel.labels[statement.operands[0].names[0]], place)
        for place, statement in enumerate(kernel.statements)
        if statement.name.split(".")[0] == "bra" and kernel.labels[statement.operands[0].names[0]] <= place
    ]
    innermost = [
        (first, last)
        for first, last in loops
        if executed[last] and not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops)
    ]
    if not innermost:
        return Counters(result.blocks), 0
    first, last = max(
        innermost,
        key=lambda loop: (multiply_adds[loop[0] : loop[1] + 1].sum(), executed[loop[0] : loop[1] + 1].sum()),
    )
    return _sum(result, range(first, last + 1)), int(executed[first])


def _sum(result: Result, places) -> Counters:
    instructions: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    executed, sectors = result.column("executed"), result.column("sectors")
    wavefronts, multiply_adds = result.column("wavefronts"), result.column("multiply_adds")
    for place in places:
        times, kind = int(executed[place]), result.program.classes[place]
        instructions[kind] += times
        # Waits for copies have the same class, but do not access memory.
        sums["global_requests"] += times * (kind in _GLOBAL and sectors[place] > 0)
        sums["shared_requests"] += times * (kind in _SHARED and wavefronts[place] > 0)
        sums["sectors"] += int(sectors[place])
        sums["wavefronts"] += int(wavefronts[place])
        sums["multiply_adds"] += int(multiply_adds[place])
    return Counters(result.blocks, instructions, **sums)

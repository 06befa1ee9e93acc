"""Reconvergence of diverging lanes: the nearest instruction that all paths from a branch go through."""

import networkx

from ptx_executor.parse import Kernel

_LEAVES = ("ret", "exit")


def reconvergence(kernel: Kernel) -> dict[int, int]:
    """Reconvergence point of every guarded branch, as indices into ``kernel.statements``; -1: only at the end."""
    end = len(kernel.statements)
    flow = networkx.DiGraph()
    branches = []
    for place, statement in enumerate(kernel.statements):
        base = statement.name.split(".")[0]
        if base == "bra":
            flow.add_edge(place, kernel.labels[statement.operands[0].names[0]])
        if base in _LEAVES:
            flow.add_edge(place, end)
        if base not in ("bra", *_LEAVES) or statement.guard:
            flow.add_edge(place, place + 1)
        if base == "bra" and statement.guard:
            branches.append(place)
    if not branches:
        return {}
    # No path leads from an endless loop to the end: branches in it never reconverge.
    nearest = networkx.immediate_dominators(flow.reverse(copy=False), end)
    return {place: -1 if nearest.get(place, end) == end else nearest[place] for place in branches}

"""How close each student is to the bar that a new default had to reach (docs/experts.md), over all searches.

The bar: on the rows of README, no row significantly behind the MLP, a mean difference above zero, and at least three
rows significantly ahead. The rows used here are those of the searches, with accuracies on validation nodes.
"""

from collections.abc import Sequence

# Files of results/searches whose rows belong together, by the width of their students. experts_unseen.csv is not
# included, because its two seeds were used to choose the variants of the others.
SEARCHES = (
    ("128", ("experts_shortlist", "experts_seen")),
    ("128", ("experts_untried",)),
    ("preset's", ("experts_full", "experts_recipe")),
)
SIGNIFICANT = 0.05


def against_the_mlp(read, searches: Sequence[tuple[str, Sequence[str]]] = SEARCHES) -> list[list[str]]:
    """A row for each kind of student: width, runs, cells, cells significantly ahead and behind, mean, error, p.

    A cell is a graph in one setting. Cells with a single seed, for which no test is possible, are skipped. *p* is
    corrected by Holm over all lines; a cell is significant by the paired t-test over its seeds, as in README.

    Args:
        read: function that returns the rows of a search, given its name.
        searches: see :data:`SEARCHES`.
    """
    from rbm.experiments.comparisons import Cells, Gain, gain, holm, kinds
    from rbm.experiments.statistics import Paired, p_text, paired_test

    def common(first: Cells, second: Cells) -> Cells:
        return {cell: runs for cell, runs in first.items() if len(runs.keys() & second.get(cell, {}).keys()) > 1}

    found: list[tuple[str, str, Gain, list[Paired]]] = []
    for width, names in searches:
        known = kinds([row for name in names for row in read(name)])
        mlp = known.get("mlp", {})
        for kind, cells in known.items():
            shared = common(cells, mlp)
            if kind not in ("mlp", "teacher") and shared:
                tests = [paired_test(runs, mlp[cell]) for cell, runs in shared.items()]
                found.append((kind, width, gain(shared, mlp), tests))
    corrected = holm([lead.p for _, _, lead, _ in found])
    lines = []
    for (kind, width, lead, tests), p in sorted(zip(found, corrected, strict=True), key=lambda line: -line[0][2][0]):
        clear = [test.difference for test in tests if test.p < SIGNIFICANT]
        counts = (lead.pairs, len(tests), sum(d > 0 for d in clear), sum(d < 0 for d in clear))
        lines.append([kind, width, *map(str, counts), f"{lead.difference:+.2f}", f"{lead.error:.2f}", p_text(p)])
    return lines


HEADER = ["", "width", "runs", "cells", "ahead", "behind", "mean", "standard error", "p (Holm, all lines)"]

"""What many runs come to: means over seeds, and whether a difference between two methods is more than chance."""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scipy.stats import ttest_rel


class Summary(NamedTuple):
    """Mean and population standard deviation (ddof 0, as in the paper) over ``count`` runs."""

    mean: float
    std: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        return cls(statistics.fmean(values), statistics.pstdev(values), len(values))


class Paired(NamedTuple):
    """Mean difference of paired runs, and the two-sided p-value of the paired t-test; NaN for fewer than two pairs."""

    difference: float
    p: float
    count: int


def median_scores(blocks: Iterable[dict[str, float]]) -> dict[str, float]:
    """The paper's Score of each method: the median over blocks (graphs) of ``(accuracy - min) / (max - min)``.

    Minimum and maximum are over the methods that a block has; a method that it lacks is skipped there. A block in which
    all are equal tells nothing and is left out.

    Args:
        blocks: method -> accuracy, one for each graph.
    """
    scores: dict[str, list[float]] = {}
    for block in blocks:
        low, high = min(block.values(), default=0.0), max(block.values(), default=0.0)
        for method, accuracy in block.items():
            if high > low:
                scores.setdefault(method, []).append((accuracy - low) / (high - low))
    return {method: statistics.median(found) for method, found in scores.items()}


def paired_test(first: dict[int, float], second: dict[int, float]) -> Paired:
    """``first - second`` over the seeds that both have: ``{seed: accuracy}``. Same seed, same split, same teacher.

    Raises:
        ValueError: they have no seed in common.
    """
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        raise ValueError(f"no seed in common: {sorted(first)} and {sorted(second)}; a paired test needs the same seeds")
    differences = [first[seed] - second[seed] for seed in seeds]
    mean = statistics.fmean(differences)
    if len(set(differences)) == 1:  # no spread: the test's statistic does not exist
        return Paired(mean, 1.0 if mean == 0 else float("nan"), len(seeds))
    p = ttest_rel([first[seed] for seed in seeds], [second[seed] for seed in seeds]).pvalue
    return Paired(mean, float(p), len(seeds))

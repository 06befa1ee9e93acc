"""Statistics of several runs: means over seeds, and tests of whether methods differ by more than chance."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import chi2, rankdata, ttest_1samp


class Summary(NamedTuple):
    """Mean and sample standard deviation (ddof 1) over ``count`` runs; the deviation of a single run is 0."""

    mean: float
    std: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return cls(statistics.fmean(values), spread, len(values))

    def __str__(self) -> str:
        """``81.59 ± 0.54``; for a single run only the mean, since one run says nothing about the spread."""
        return f"{self.mean:.2f} ± {self.std:.2f}" if self.count > 1 else f"{self.mean:.2f}"


class Paired(NamedTuple):
    """Mean difference of paired runs, and the paired t-test's two-sided p-value; NaN for fewer than two pairs."""

    difference: float
    p: float
    count: int


def median_scores(blocks: Iterable[dict[str, float]]) -> dict[str, float]:
    """The paper's Score of each method: the median over blocks (graphs) of ``(accuracy - min) / (max - min)``.

    Minimum and maximum are over the methods present in a block; missing methods are skipped. Blocks in which all
    methods are equal are ignored.

    Args:
        blocks: method -> accuracy, one per graph.
    """
    scores: dict[str, list[float]] = {}
    for block in blocks:
        low, high = min(block.values(), default=0.0), max(block.values(), default=0.0)
        for method, accuracy in block.items():
            if high > low:
                scores.setdefault(method, []).append((accuracy - low) / (high - low))
    return {method: statistics.median(found) for method, found in scores.items()}


def without_rounding(points: float) -> float:
    """A mean or difference of accuracies without the rounding of its computation, which is no lead; never -0.0.

    Args:
        points: in points, of which nine digits are kept.
    """
    return round(points, 9) + 0.0


def paired_test(first: dict[int, float], second: dict[int, float]) -> Paired:
    """Paired t-test of ``first - second``, each ``{seed: accuracy}``, over the seeds that both have.

    Runs with the same seed must have the same split and teacher.

    Raises:
        ValueError: they have no seed in common.
    """
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        raise ValueError(f"no seed in common: {sorted(first)} and {sorted(second)}; a paired test needs the same seeds")
    differences = [without_rounding(first[seed] - second[seed]) for seed in seeds]
    mean = without_rounding(statistics.fmean(differences))
    if min(differences) == max(differences):  # without spread the test statistic is undefined
        return Paired(mean, 1.0 if mean == 0 and len(seeds) > 1 else float("nan"), len(seeds))
    return Paired(mean, float(ttest_1samp(differences, 0.0).pvalue), len(seeds))


class SkillingsMack(NamedTuple):
    """A Skillings-Mack test: the statistic, its degrees of freedom, and p-values by chi-square and by simulation.

    ``p_simulated`` is NaN without permutations.
    """

    statistic: float
    df: int
    p: float
    p_simulated: float


def p_text(p: float) -> str:
    """A p-value with three digits; empty for NaN, ``< 0.001`` below that."""
    if math.isnan(p):
        return ""
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def skillings_mack(blocks: Iterable[dict[str, float]], *, permutations: int = 0) -> SkillingsMack:
    r"""Test whether methods differ over graphs with missing methods (Skillings and Mack, Technometrics 1981).

    Methods are ranked within each block (ties share the mean rank); a missing method gets the block's mean rank. With
    ``k_i`` methods in block ``i``, ``A_j = sum_i sqrt(12 / (k_i + 1)) (r_ij - (k_i + 1) / 2)``, and the statistic is
    ``A^T Sigma^+ A``, where ``-Sigma_jl`` is the number of blocks with both ``j`` and ``l``, and the rows of ``Sigma``
    sum to zero. For complete blocks without ties, it is Friedman's statistic. Blocks with fewer than two methods are
    ignored.

    Args:
        blocks: method -> accuracy, one per graph.
        permutations: number of random orders within the blocks for ``p_simulated``, which is valid for few blocks too.

    Raises:
        ValueError: no block has two methods.
    """
    kept = [block for block in blocks if len(block) >= 2]
    if not kept:
        raise ValueError("blocks: got none with two methods or more; a test needs something to compare")
    methods = sorted({method for block in kept for method in block})
    place = {method: i for i, method in enumerate(methods)}
    members = [np.array([place[method] for method in block]) for block in kept]
    weighted = [_centred_ranks(np.array(list(block.values()))) for block in kept]

    sigma = np.zeros((len(methods), len(methods)))
    for found in members:
        sigma[np.ix_(found, found)] -= 1.0
    np.fill_diagonal(sigma, 0.0)
    np.fill_diagonal(sigma, -sigma.sum(axis=1))
    inverse, df = np.linalg.pinv(sigma), int(np.linalg.matrix_rank(sigma))

    sums = np.zeros(len(methods))
    for found, ranks in zip(members, weighted, strict=True):
        sums[found] += ranks
    statistic = float(sums @ inverse @ sums)
    simulated = float("nan")
    if permutations:
        random = np.random.default_rng(0)
        drawn = np.zeros((permutations, len(methods)))
        for found, ranks in zip(members, weighted, strict=True):
            drawn[:, found] += random.permuted(np.tile(ranks, (permutations, 1)), axis=1)
        chance = np.einsum("pi,ij,pj->p", drawn, inverse, drawn)
        # The observed order is one of the possible orders, so no p-value is zero.
        simulated = float((1 + (chance >= statistic - 1e-9).sum()) / (1 + permutations))
    return SkillingsMack(statistic, df, float(chi2.sf(statistic, df)), simulated)


def _centred_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks within a block minus their mean, times the block's weight."""
    middle = (len(values) + 1) / 2
    return np.sqrt(12 / (len(values) + 1)) * (rankdata(values) - middle)

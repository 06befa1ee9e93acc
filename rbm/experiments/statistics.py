"""Statistics of many runs: means over seeds, and whether differences between methods are more than chance."""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import chi2, rankdata, ttest_rel


class Summary(NamedTuple):
    """Mean and the sample's standard deviation (ddof 1) over ``count`` runs; 0 of a single one."""

    mean: float
    std: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return cls(statistics.fmean(values), spread, len(values))

    def __str__(self) -> str:
        """``81.59 ± 0.54``; of one run the mean alone, since one run says nothing of how far others lie apart."""
        return f"{self.mean:.2f} ± {self.std:.2f}" if self.count > 1 else f"{self.mean:.2f}"


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


class SkillingsMack(NamedTuple):
    """A Skillings-Mack test: the statistic, its degrees of freedom, and p-values by chi-square and by simulation.

    ``p_simulated`` is NaN where no permutations were asked for.
    """

    statistic: float
    df: int
    p: float
    p_simulated: float


def skillings_mack(blocks: Iterable[dict[str, float]], *, permutations: int = 0, seed: int = 0) -> SkillingsMack:
    r"""Whether methods differ over graphs, some of which lack some methods (Skillings and Mack, Technometrics 1981).

    Methods are ranked within each block (ties share the mean rank); a missing one counts as the block's mean rank. With
    ``k_i`` methods in block ``i``, ``A_j = sum_i sqrt(12 / (k_i + 1)) (r_ij - (k_i + 1) / 2)``, and the statistic is
    ``A^T Sigma^+ A``, where ``-Sigma_jl`` is the number of blocks that hold both ``j`` and ``l`` and rows of ``Sigma``
    sum to zero. For blocks that lack nothing and have no ties it is Friedman's statistic. Blocks with fewer than two
    methods are left out.

    Args:
        blocks: method -> accuracy, one for each graph.
        permutations: random orders within the blocks for ``p_simulated``, which does not rest on many blocks.
        seed: of these.

    Raises:
        ValueError: no block with two methods.
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
        random = np.random.default_rng(seed)
        drawn = np.zeros((permutations, len(methods)))
        for found, ranks in zip(members, weighted, strict=True):
            drawn[:, found] += random.permuted(np.tile(ranks, (permutations, 1)), axis=1)
        chance = np.einsum("pi,ij,pj->p", drawn, inverse, drawn)
        # The order that was seen is one of the possible ones: no p-value is zero.
        simulated = float((1 + (chance >= statistic - 1e-9).sum()) / (1 + permutations))
    return SkillingsMack(statistic, df, float(chi2.sf(statistic, df)), simulated)


def _centred_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks within a block around their mean, with the block's weight."""
    middle = (len(values) + 1) / 2
    return np.sqrt(12 / (len(values) + 1)) * (rankdata(values) - middle)

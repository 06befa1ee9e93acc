"""Two models on the same nodes: is the difference more than chance?"""

import math
from typing import NamedTuple

from scipy.stats import binomtest
from torch import Tensor

CONFIDENCE = 0.95
_Z = 1.959964  # of a normal distribution, that share lies within so many standard deviations


class Comparison(NamedTuple):
    """Two models on the same nodes.

    Attributes:
        difference: of their shares of right answers, the first's less the second's.
        low, high: ends of its interval at :data:`CONFIDENCE`.
        p: of McNemar's exact test, two-sided, which is a little more cautious than the interval.
        nodes: how many were asked.
    """

    difference: float
    low: float
    high: float
    p: float
    nodes: int

    @property
    def is_chance(self) -> bool:
        """Whether the difference may be no more than chance."""
        return self.low <= 0 <= self.high


def compare(first: Tensor, second: Tensor) -> Comparison:
    """Compare two models by the nodes that only one of them has right; both are bool ``[N]``, true where right.

    The interval is that of Bonett and Price (Adjusted Wald confidence interval for a difference of binomial proportions
    based on paired data, JEBS 2012): Wald's, with one node added to either side, which holds for few nodes too.
    """
    won, lost, nodes = int((first & ~second).sum()), int((second & ~first).sum()), len(first)
    ours, theirs = (won + 1) / (nodes + 2), (lost + 1) / (nodes + 2)
    middle = ours - theirs
    reach = _Z * math.sqrt((ours + theirs - middle**2) / (nodes + 2))
    p = float(binomtest(won, won + lost).pvalue) if won + lost else 1.0
    return Comparison((won - lost) / nodes, max(-1.0, middle - reach), min(1.0, middle + reach), p, nodes)

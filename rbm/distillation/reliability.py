"""Reliability of soft labels: high if noise on the input changes their entropy little.

This is the reliability of Knowledge-inspired Reliable Distillation (KRD, Wu et al., ICML 2023), as the paper uses it. A
node ``u`` is drawn as a neighbour with probability ``1 - d_u ** power``. ``d_u`` in [0, 1] measures the change of the
entropy of its soft label, and ``power`` is learned from the nodes on which student and teacher agree.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import OptimizeWarning, curve_fit
from torch import Tensor

from rbm.config import ReliabilityConfig


def fit_power(
    change: Tensor,
    agree: Tensor,
    power: float = 1.0,
    *,
    num_bins: int = 50,
    bin_offset: str = "released",
    ignore_empty_bins: bool = False,
) -> float | None:
    """Fit the exponent of ``1 - d ** power`` to the share of nodes at ``d`` on which student and teacher agree.

    Nodes are counted in bins of ``d`` over [0, 1]. The share of agreeing nodes in each bin, rescaled to [0, 1] over all
    bins, is fitted by least squares.

    Args:
        change: ``d``, ``[N]`` in [0, 1].
        agree: bool ``[N]``.
        power: initial value of the fit.
        num_bins: number of bins.
        bin_offset: position of a share in its bin: ``center``; or ``released``, 0.05 to the right of the left edge
            (the centre for ten bins, which the released code also uses for its fifty).
        ignore_empty_bins: ignore empty bins; otherwise they count as no agreement, as in the released code.

    Returns:
        The exponent, or None if it cannot be fitted because all bins are equal or the fit does not converge.
    """
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    d, agrees = change.double().cpu().numpy(), agree.cpu().numpy()
    agreeing, others = (np.histogram(d[chosen], edges)[0].astype(float) for chosen in (agrees, ~agrees))
    share = agreeing / (agreeing + others + 1e-6)
    x = edges[:-1] + (0.5 / num_bins if bin_offset == "center" else 0.05)
    if ignore_empty_bins:
        share, x = share[agreeing + others > 0], x[agreeing + others > 0]
    if share.size < 2 or np.ptp(share) == 0:
        return None
    share = (share - share.min()) / np.ptp(share)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OptimizeWarning)  # of the covariance, which is not used
            (fitted,), _ = curve_fit(lambda d, a: 1 - d**a, x, share, p0=[power])
    except (RuntimeError, ValueError):
        return None
    return float(fitted) if np.isfinite(fitted) and fitted > 0 else None


@dataclass
class Reliability:
    """The reliability of each soft label, with an exponent that is learned during training.

    Attributes:
        change: ``d``, ``[N]`` in [0, 1]: see :func:`rbm.teachers.outputs.entropy_change`. Zero means full trust.
        config: the first exponent, and when and how it is learned.
        power: the present exponent.
    """

    change: Tensor
    config: ReliabilityConfig
    power: float = field(init=False)

    def __post_init__(self) -> None:
        self.power = self.config.init_power

    def probabilities(self) -> Tensor:
        """``1 - d ** power``, ``[N]`` in [0, 1] (paper, Eq. 11 before normalisation)."""
        return (1 - self.change**self.power).clamp_(0.0, 1.0)

    def is_due(self, epoch: int) -> bool:
        """Whether the exponent is learned after this epoch."""
        since = epoch - self.config.update_start_epoch
        return since >= 0 and since % self.config.update_every == 0

    def learn(self, agree: Tensor) -> None:
        """Move the exponent towards the fit to ``agree [N]``; if the fit fails, the exponent does not change."""
        config = self.config
        fitted = fit_power(
            self.change,
            agree,
            self.power,
            num_bins=config.num_bins,
            bin_offset=config.bin_offset,
            ignore_empty_bins=config.ignore_empty_bins,
        )
        if fitted is not None:
            self.power = config.power_momentum * self.power + (1 - config.power_momentum) * fitted

    def state(self) -> dict[str, Any]:
        return {"power": self.power}

    def restore(self, state: dict[str, Any]) -> None:
        self.power = state["power"]

"""The shapes that suites measure, and the ways in which rows may be routed."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """``rows`` rows of ``features`` to ``outputs`` through ``top_k`` of ``experts``."""

    rows: int
    features: int = 256
    outputs: int = 256
    experts: int = 8
    top_k: int = 3

    def __str__(self) -> str:
        return f"B={self.rows} D={self.features} N={self.outputs} E={self.experts} k={self.top_k}"

    @property
    def multiplications(self) -> int:
        """Of the experts, forward."""
        return self.rows * self.top_k * self.features * self.outputs


# The graphs of the paper by their nodes: Cora, Coauthor-CS and Physics, ogbn-arxiv, ogbn-products.
REFERENCE = Shape(169_343)
SHAPES = (
    REFERENCE,
    Shape(2_708),
    Shape(2_708, 1_433),
    Shape(18_333),
    Shape(18_333, 128, 128, 4),
    Shape(34_493, 8_415),
    Shape(34_493, 512, 512, 5),
    Shape(169_343, 256, 256, 3),
    Shape(169_343, 256, 256, 16),
    Shape(169_343, 256, 256, 32),
    Shape(169_343, 256, 256, 64, 8),
    Shape(169_343, 1_024, 1_024),
    Shape(2_449_029),
)
ROUTINGS = ("uniform", "skewed", "clustered")


def for_this_machine(most_multiplications: int) -> tuple[Shape, ...]:
    """The shapes that take at most so many multiplications forward."""
    return tuple(shape for shape in SHAPES if shape.multiplications <= most_multiplications)


def route(kind: str, shape: Shape, device: str = "cpu") -> Tensor:
    """Experts of every row, int32 ``[B, k]``.

    ``uniform``: any set alike. ``skewed``: the e-th expert with odds of 1 / e, as Zipf's law has it. ``clustered``:
    rows belong to 16 clusters of one set each, which is what memory vectors that follow their rows tend to.
    """
    if kind == "clustered":
        sets = torch.rand(16, shape.experts).topk(shape.top_k).indices
        return sets[torch.randint(16, (shape.rows,))].int().to(device)
    odds = torch.ones(shape.experts)
    if kind == "skewed":
        odds = 1 / torch.arange(1, shape.experts + 1)
    # The k largest of log(odds) + Gumbel noise are k draws without replacement.
    keys = odds.log() - torch.empty(shape.rows, shape.experts).exponential_().log()
    return keys.topk(shape.top_k).indices.int().to(device)

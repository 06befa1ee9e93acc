r"""Distance between sparse rows and the normalised output of a linear map, without computing that output.

With hidden rows ``u``, a linear map ``y = W u + b`` to the width of the data ``x``, and ``z = y / \|y\|``:

.. math:: \sum_i (z - x)_i^2 = \|z\|^2 - 2 \frac{y \cdot x}{\|y\|} + \|x\|^2, \quad
    y \cdot x = u \cdot (x W) + x \cdot b, \quad \|y\|^2 = u^T (W^T W) u + 2 u \cdot (W^T b) + \|b\|^2

``x W`` is a sparse product, and both dimensions of ``W^T W`` are the hidden width. For data with thousands of columns
that are mostly zeros, this is a small part of the work for ``y`` and its derivative.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rbm.nn.sparse_rows import SparseRows, to_csr

_EPS = 1e-12  # as torch.nn.functional.normalize


class SparseTarget:
    """Sparse rows of data ``[N, F]`` to reconstruct.

    Args:
        rows: rows with only sparse columns.

    Raises:
        ValueError: some columns are dense.
    """

    def __init__(self, rows: SparseRows) -> None:
        if rows.dense is not None:
            raise ValueError(f"rows: {rows.dense.shape[1]} of their columns are dense, expected only sparse columns")
        self.shape = rows.shape
        self.matrix = rows.to_csr()
        self.transposed = to_csr(self.matrix.t())
        self.squares = rows.values.square().sum()

    def loss(self, hidden: Tensor, layer: nn.Linear) -> Tensor:
        """Mean squared difference over ``N F`` numbers between the unit rows of ``layer(hidden)`` and the data.

        Args:
            hidden: ``[N, H]``.
            layer: linear layer from ``H`` to ``F``, with a bias.
        """
        products, squares = _ProductsAndSquares.apply(hidden, layer.weight, layer.bias, self)
        lengths = squares.clamp_min(_EPS**2).sqrt()
        unit = (squares / lengths.square()).detach()  # one, except for a row of zeros
        return ((unit - 2 * products / lengths).sum() + self.squares) / (self.shape[0] * self.shape[1])


class _ProductsAndSquares(torch.autograd.Function):
    """``y . x`` and ``|y|^2`` of every row, ``[N]`` each, of ``y = u W^T + b``."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor, target: SparseTarget) -> tuple[Tensor, Tensor]:
        seen = target.matrix @ weight
        shift = bias @ weight
        spread = torch.addmm(shift, hidden, weight.T @ weight)  # half of the derivative of the squares
        ctx.save_for_backward(hidden, weight, bias, seen, spread)
        ctx.target = target
        products = torch.linalg.vecdot(hidden, seen) + target.matrix @ bias
        return products, torch.linalg.vecdot(hidden, spread) + hidden @ shift + bias @ bias

    @staticmethod
    @once_differentiable
    def backward(ctx, products: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        hidden, weight, bias, seen, spread = ctx.saved_tensors
        transposed = ctx.target.transposed
        to_hidden = products[:, None] * seen + 2 * squares[:, None] * spread
        weighted = squares[:, None] * hidden
        total = weighted.sum(0)
        to_weight = transposed @ (products[:, None] * hidden)
        to_weight.addmm_(weight, weighted.T @ hidden, alpha=2).addr_(bias, total, alpha=2)
        to_bias = transposed @ products + 2 * (weight @ total + squares.sum() * bias)
        return to_hidden, to_weight, to_bias, None

"""Distance of unit rows to sparse data, from products of the hidden width only."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rbm.nn.reconstruction import SparseTarget
from rbm.nn.sparse_rows import SparseRows


def test_loss_and_gradients_are_those_of_the_dense_rows():
    torch.manual_seed(3)
    data = torch.rand(30, 40, dtype=torch.float64) * (torch.rand(30, 40) < 0.1)
    data[4] = 0.0
    layer, hidden = nn.Linear(6, 40).double(), torch.randn(30, 6, dtype=torch.float64, requires_grad=True)
    expected = F.mse_loss(F.normalize(layer(hidden), dim=-1), data)
    found = SparseTarget(SparseRows(data.to_sparse_csr())).loss(hidden, layer)
    torch.testing.assert_close(found, expected)
    parts = [hidden, layer.weight, layer.bias]
    for mine, plain in zip(
        torch.autograd.grad(3 * found, parts), torch.autograd.grad(3 * expected, parts), strict=True
    ):
        torch.testing.assert_close(mine, plain)


def test_rows_of_zeros_have_the_data_s_length_alone():
    data, layer = torch.eye(3), nn.Linear(2, 3)
    nn.init.zeros_(layer.bias)
    found = SparseTarget(SparseRows(data.to_sparse_csr())).loss(torch.zeros(3, 2), layer)
    torch.testing.assert_close(found, torch.tensor(1 / 3))


def test_dense_columns_are_refused():
    rows = torch.eye(3)
    with pytest.raises(ValueError, match="rows: 3 of their columns are dense, expected only sparse columns"):
        SparseTarget(SparseRows(rows.to_sparse_csr(), rows))

"""Products with the sparse adjacency: values, derivatives, the dtype of indices, and what is kept for how long."""

import gc
import warnings
import weakref

import pytest
import torch

from rbm.teachers import APPNP, GCN, GraphSAGE
from rbm.teachers.aggregation import aggregate, sparse_adjacency

EDGES = torch.tensor([[0, 1, 2, 3, 0, 0], [1, 2, 0, 0, 2, 2]])
WEIGHT = torch.tensor([0.5, 1.0, 2.0, -1.0, 0.25, 0.5])
DENSE = torch.tensor([[0.0, 0, 2, -1], [0.5, 0, 0, 0], [0.75, 1, 0, 0], [0, 0, 0, 0]])


@pytest.fixture
def made(monkeypatch) -> list[torch.Tensor]:
    """The matrices that were converted to CSR, as a transpose is."""
    found, real = [], torch.Tensor.to_sparse_csr
    monkeypatch.setattr(torch.Tensor, "to_sparse_csr", lambda matrix: found.append(matrix) or real(matrix))
    return found


def test_a_matrix_of_the_edges_with_indices_of_32_bits():
    adjacency = sparse_adjacency(EDGES, WEIGHT, 4)
    assert torch.equal(adjacency.to_dense(), DENSE)
    assert adjacency.crow_indices().dtype == adjacency.col_indices().dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_first_and_second_derivatives(dtype):
    adjacency = sparse_adjacency(EDGES, WEIGHT.to(dtype), 4)
    x = torch.randn(4, 3, dtype=dtype, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (gradient,) = torch.autograd.grad(aggregate(adjacency, x).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), x)
    matrix = DENSE.to(dtype)
    (expected,) = torch.autograd.grad((matrix @ x).pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(second, torch.autograd.grad(expected.square().sum(), x)[0])


def test_the_derivative_has_the_bits_of_pytorch():
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 300, (2, 4000), generator=generator)
    adjacency = sparse_adjacency(edges, torch.rand(4000, generator=generator), 300)
    x = torch.randn(300, 40, generator=generator, requires_grad=True)
    expected = torch.autograd.grad((adjacency @ x).square().sum(), x)
    assert torch.equal(torch.autograd.grad(aggregate(adjacency, x).square().sum(), x)[0], expected[0])


def test_the_transpose_is_made_once_and_freed_with_its_matrix(made):
    adjacency = sparse_adjacency(EDGES, WEIGHT, 4)
    made.clear()
    x = torch.randn(4, 3, requires_grad=True)
    for _ in range(3):
        aggregate(adjacency, aggregate(adjacency, x)).sum().backward()
    assert len(made) == 1
    made.clear()
    freed = weakref.ref(adjacency)
    del adjacency
    gc.collect()
    assert freed() is None


@pytest.mark.parametrize("teacher", [GraphSAGE, GCN, APPNP])
def test_teachers_sum_by_it(teacher, small_graph, made):
    """PyTorch would transpose the adjacency in every layer and every epoch."""
    model = teacher(12, 8, 3)
    adjacency = model.adjacency(small_graph.edge_index, small_graph.num_nodes)
    assert adjacency.col_indices().dtype == torch.int32
    made.clear()
    for _ in range(2):
        model(small_graph.x, adjacency).sum().backward()
    assert len(made) == 1

"""Message passing of teachers and students as the product of a sparse matrix and the nodes' rows."""

import warnings

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.utils import to_torch_csr_tensor

from rbm.utils.precision import full_precision, wide
from rbm_kernels.ops.sparse_expert_matmul.reference import csr

# Rows -> adjacency -> (version of the rows, product); an entry disappears with either.
_products = WeakTensorKeyDictionary()
_transposes = WeakTensorKeyDictionary()  # adjacency -> its transpose
KEPT_BYTES = 2**28  # size of the largest product that is kept, to save memory with large graphs


def sparse_adjacency(edge_index: Tensor, weight: Tensor, num_nodes: int) -> Tensor:
    """Edges source -> target as a CSR matrix ``[N, N]`` with ``A[target, source]``; weights of equal edges add up.

    On a CPU, a sparse product is faster than gathering and scattering messages along edges. It needs no
    ``[edges, width]`` buffer and adds in a fixed order. The indices are int32 where these suffice: a product with int64
    indices first converts them.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR|invariant)")  # PyTorch's own notices
        matrix = to_torch_csr_tensor(edge_index.flip(0), weight, size=(num_nodes, num_nodes))
    if max(num_nodes, matrix.values().shape[0]) > torch.iinfo(torch.int32).max:
        return matrix
    return csr(matrix.crow_indices().int(), matrix.col_indices().int(), matrix.values(), (num_nodes, num_nodes))


def spread(adjacency: Tensor, x: Tensor) -> Tensor:
    """``adjacency @ x``, ``[N, F]``. If ``x`` needs no gradient, the product is cached until ``x`` changes or either
    tensor is freed.

    The features of a graph do not change between epochs, so their product is computed once.
    """
    # Tensors of inference mode cannot be used in training, and have no version counter.
    inference = x.is_inference() or torch.is_inference_mode_enabled()
    if x.requires_grad or inference or torch.compiler.is_compiling():
        return aggregate(adjacency, x)
    known = _products.setdefault(x, WeakTensorKeyDictionary())
    version, product = known.get(adjacency, (None, None))
    if version != x._version:
        product = aggregate(adjacency, x)
        if product.nbytes <= KEPT_BYTES:
            known[adjacency] = x._version, product
    return product


class _Product(torch.autograd.Function):
    """``adjacency @ x``. The backward pass needs the transpose of the matrix, which PyTorch would make in every pass;
    this takes many times as long as a narrow product.
    """

    @staticmethod
    def forward(ctx, x: Tensor, adjacency: Tensor) -> Tensor:
        ctx.adjacency = adjacency
        return adjacency @ x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        transpose = _transposes.get(ctx.adjacency)
        if transpose is None:
            transpose = _transposes[ctx.adjacency] = ctx.adjacency.t().to_sparse_csr()
        return aggregate(transpose, gradient), None


def aggregate(adjacency: Tensor, x: Tensor) -> Tensor:
    """``adjacency @ x``, in float32 under autocast: a CPU has no sparse products in bfloat16, and the sums of a node
    with many neighbours would lose digits in it.

    The transpose for the backward pass is kept until ``adjacency`` is freed. Edge weights get no gradient.
    """
    with full_precision(x.device):
        x = wide(x)
        if torch.compiler.is_compiling() or not (x.requires_grad and torch.is_grad_enabled()):
            return adjacency @ x
        return _Product.apply(x, adjacency)

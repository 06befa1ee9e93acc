"""Sparse rows, such as bags of words: the operations of layers and students on them, without a dense copy.

:func:`as_rows` takes a dense tensor, a CSR tensor ``[B, D]``, or a pair of CSR and dense columns
``([B, Ds], [B, Dd])``. The functions below are operations of :mod:`rbm_kernels` and :mod:`torch.nn.functional` for
dense and sparse rows, with the same names and results.
"""

import warnings
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rbm_kernels
from rbm.nn.dropout import dropout as drop
from rbm.nn.half_rows import HalfPrecisionRows, index_error
from rbm.utils.precision import full_precision
from rbm.utils.transforms import is_eager_on_cpu, is_transformed
from rbm_kernels.checks import accumulation_dtype, check_temperature
from rbm_kernels.ops.cosine_topk.reference import EPS, LONG, unit
from rbm_kernels.ops.expert_matmul.reference import dense_gates
from rbm_kernels.ops.sparse_expert_matmul.reference import csr, dense_rows


class SparseRows:
    """Rows ``[B, Ds + Dd]``: ``Ds`` columns in compressed sparse form, then ``Dd`` dense columns, if any.

    A CSR tensor can be used instead; building this object once avoids a check and a copy of the indices in each
    forward. The sparse entries are data and get no gradient. The dense columns get one.

    Args:
        sparse: CSR tensor ``[B, Ds]``, float32 or float64, indices int32 or int64 (stored as int32). The columns of a
            row ascend and are distinct, as PyTorch requires; explicit zeros are allowed.
        dense: ``[B, Dd]`` of the same dtype and device.

    Raises:
        TypeError: the layout or dtype is not supported.
        ValueError: ``sparse`` is not a matrix, its columns are out of order or repeated, it has 2^31 entries or more,
            the numbers of rows differ, or entries require a gradient.
    """

    def __init__(self, sparse: Tensor, dense: Tensor | None = None) -> None:
        _check_sparse(sparse)
        self.crow = sparse.crow_indices().to(torch.int32)
        self.col = sparse.col_indices().to(torch.int32)
        self.values = sparse.values().detach()  # torch.compile takes no view of a CSR tensor
        self.width = sparse.shape[1]
        _check_order(self.crow, self.col)
        if dense is not None:
            _check_dense(dense, sparse)
        self.dense = dense

    def _with(self, **parts) -> "SparseRows":
        """These rows with other parts, unchecked."""
        rows = object.__new__(SparseRows)
        rows.__dict__.update(self.__dict__, **parts)
        return rows

    @property
    def shape(self) -> torch.Size:
        extra = 0 if self.dense is None else self.dense.shape[1]
        return torch.Size((self.crow.shape[0] - 1, self.width + extra))

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def __repr__(self) -> str:
        return f"SparseRows({list(self.shape)}, {self.values.shape[0]} entries, {self.dtype})"

    def to(self, *args, **kwargs) -> "SparseRows":
        """Like :meth:`torch.Tensor.to`; indices are moved and stay int32."""
        values = self.values.to(*args, **kwargs)
        crow, col = self.crow.to(values.device), self.col.to(values.device)
        dense = None if self.dense is None else self.dense.to(*args, **kwargs)
        return self._with(crow=crow, col=col, values=values, dense=dense)

    def to_csr(self) -> Tensor:
        """The sparse columns as a CSR tensor ``[B, Ds]``."""
        return csr(self.crow, self.col, self.values, (self.shape[0], self.width))

    def to_dense(self) -> Tensor:
        """All columns as one dense tensor, for small matrices and for models that need dense rows."""
        sparse = self.to_csr().to_dense()
        return sparse if self.dense is None else torch.cat([sparse, self.dense], dim=1)

    def __getitem__(self, index: slice | Tensor) -> "SparseRows":
        """The rows of a slice, of a boolean mask ``[B]``, or of integer indices ``[b]``.

        Raises:
            TypeError: the index selects anything else, such as a single row.
        """
        rows = torch.arange(self.shape[0], device=self.device)[index]
        if rows.dim() != 1:
            raise index_error("SparseRows", index)
        dense = None if self.dense is None else self.dense[index]
        counts = self.crow.diff()[rows]
        crow = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        # Entry i of the result is entry i - crow[row] of its source row.
        entries = torch.arange(int(crow[-1]), device=self.device)
        entries += torch.repeat_interleave(self.crow[rows] - crow[:-1], counts, output_size=entries.shape[0])
        return self._with(crow=crow, col=self.col[entries], values=self.values[entries], dense=dense)

    def spread(self, per_row: Tensor) -> Tensor:
        """``per_row [B]`` repeated for each of a row's entries, ``[nnz]``."""
        return torch.repeat_interleave(per_row, self.crow.diff(), output_size=self.values.shape[0])

    def squared_norms(self) -> Tensor:
        """Squared length of each row, ``[B]``, with a gradient to the dense columns."""
        ones = self.values.new_ones(self.width, 1)
        squares = _times(self, self.values.square(), ones).squeeze(1)
        return squares if self.dense is None else squares + self.dense.square().sum(-1)


Rows: TypeAlias = Tensor | SparseRows
Features: TypeAlias = Tensor | tuple[Tensor, Tensor] | SparseRows | HalfPrecisionRows


def as_rows(features: Features) -> Rows:
    """Return dense tensors and :class:`SparseRows` unchanged, wrap CSR tensors and pairs of sparse and dense columns,
    and read all of :class:`~rbm.nn.half_rows.HalfPrecisionRows`, which are normally read in parts.

    Raises:
        TypeError: ``features`` is none of these.
        ValueError: :class:`SparseRows` does not accept the sparse rows, or a tuple does not have two tensors.
    """
    if isinstance(features, Tensor):
        refuse_nested(features)
        return features if features.layout == torch.strided else SparseRows(features)
    if isinstance(features, SparseRows):
        return features
    if isinstance(features, HalfPrecisionRows):
        return features.to_dense()
    if isinstance(features, tuple | list) and all(isinstance(part, Tensor) for part in features):
        if len(features) != 2:
            raise ValueError(f"features are {len(features)} tensors, expected the pair (CSR columns, dense columns)")
        return SparseRows(*features)
    hint = "; use torch.as_tensor(features)" if isinstance(features, np.ndarray | list) else ""
    given = "None" if features is None else f"a {type(features).__name__}"
    refuse_symbols(features)
    raise TypeError(
        f"features are {given}, expected a dense or CSR tensor, or the pair (CSR columns, dense columns){hint}"
    )


def refuse_symbols(features: object) -> None:
    """Raise TypeError if ``features`` is a symbol of ``torch.fx.symbolic_trace``, which stands for any object."""
    if isinstance(features, torch.fx.Proxy):
        raise TypeError(
            "torch.fx.symbolic_trace cannot trace a layer that routes rows: make the layer a leaf of the tracer"
            " (torch.fx.Tracer.is_leaf_module), or use torch.export.export"
        )


def refuse_nested(features: Tensor) -> None:
    """Raise TypeError if ``features`` is a nested tensor."""
    if features.is_nested:
        raise TypeError(
            "features are a nested tensor, expected a dense one; pass the rows of one with layout=torch.jagged,"
            " features.values(), and build the output by torch.nested.nested_tensor_from_jagged(output,"
            " features.offsets())"
        )


def to_dense(rows: Rows | HalfPrecisionRows) -> Tensor:
    """All rows as one dense tensor in memory, ``[B, D]``; a dense tensor is returned unchanged."""
    return rows if isinstance(rows, Tensor) else rows.to_dense()


def in_single_precision(features: Features) -> Rows:
    """:func:`as_rows`, with float16 rows converted to float32, for models that take all rows at once."""
    rows = as_rows(features)
    return rows.float() if rows.dtype == torch.float16 else rows


def packed(features: Features) -> Rows | HalfPrecisionRows:
    """Rows for many passes: dense rows as :class:`SparseRows` if that is faster, float16 rows without a copy.

    Sparse rows are faster on the CPU for at least 2^20 numbers of which at most one in fifty is not zero, as on Cora
    and CiteSeer.
    """
    rows = as_rows(features)
    if rows.dtype == torch.float16:
        return HalfPrecisionRows(rows)
    if isinstance(rows, SparseRows) or rows.device.type != "cpu" or rows.dtype not in (torch.float32, torch.float64):
        return rows
    if rows.numel() < 2**20 or int(torch.count_nonzero(rows)) * 50 > rows.numel():
        return rows
    return SparseRows(to_csr(rows.detach()))


def to_csr(matrix: Tensor) -> Tensor:
    """A matrix of any layout as a CSR tensor, without PyTorch's notices that CSR is in beta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR|invariant)")
        return matrix.to_sparse_csr()


def concat_columns(features: Features, dense: Tensor) -> Rows | HalfPrecisionRows:
    """``features [B, F]`` with the columns ``dense [B, D]`` to their right; sparse and float16 rows stay so."""
    if isinstance(features, HalfPrecisionRows):
        return features.concat_columns(dense)
    rows = as_rows(features)
    dense = dense.to(rows.device, rows.dtype)
    if not isinstance(rows, SparseRows):
        return torch.cat([rows, dense], dim=1)
    if rows.dense is not None:
        dense = torch.cat([rows.dense, dense], dim=1)
    _check_dense(dense, rows)
    return rows._with(dense=dense)


def dropout(rows: Rows, p: float, training: bool) -> Rows:
    """Dropout (:mod:`rbm.nn.dropout`) of stored entries and dense columns; other entries are zero anyway."""
    if not isinstance(rows, SparseRows):
        return drop(rows, p, training)
    if p == 0 or not training:
        return rows
    dense = None if rows.dense is None else drop(rows.dense, p)
    return rows._with(values=drop(rows.values, p), dense=dense)


def linear(rows: Rows, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`torch.nn.functional.linear`: ``[B, N]``."""
    if not isinstance(rows, SparseRows):
        return F.linear(rows, weight, bias)
    # The grouped matmul with one expert.
    gates = rows.values.new_ones(rows.shape[0], 1)
    experts = torch.zeros_like(gates, dtype=torch.int32)
    return expert_matmul(rows, weight[None], None if bias is None else bias[None], None, gates, experts)


class Linear(nn.Linear):
    """:class:`torch.nn.Linear` that takes dense or sparse rows."""

    def forward(self, rows: Rows) -> Tensor:
        return linear(rows, self.weight, self.bias)

    def network_layer(self) -> rbm_kernels.NetworkLayer:
        """The layer in the form that :func:`rbm_kernels.packed_network` takes."""
        bias = None if self.bias is None else self.bias[None]
        return rbm_kernels.NetworkLayer(self.weight[None], bias, self.out_features, self.in_features)


def cosine_topk(rows: Rows, memory: Tensor, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`rbm_kernels.cosine_topk`. Gates and cosines pass gradients to dense columns."""
    if not isinstance(rows, SparseRows):
        return rbm_kernels.cosine_topk(rows, memory, k, temperature=temperature)
    dtype = accumulation_dtype(rows, memory)
    check_temperature("cosine_topk", "temperature", temperature, dtype)
    # Routing stays in this dtype under autocast, as in the operator.
    with full_precision(rows.device):
        wide, squared = _shrunk(rows.to(dtype))
        memory = unit(memory.detach().to(dtype))
        dots = _times(wide, wide.values, memory[:, : rows.width].T)
        if wide.dense is not None:
            dots = dots + wide.dense @ memory[:, rows.width :].T
        # A row shorter than EPS has no direction and gets no gradient.
        directed = squared > EPS**2
        norms = torch.where(directed, squared, EPS**2).sqrt()
        dots = torch.where(directed[:, None], dots, dots.detach())
        # A stable sort instead of topk, because the lower expert must win among equal cosines.
        cosines, experts = torch.sort(dots / norms[:, None], dim=-1, descending=True, stable=True)
        cosines = cosines[:, :k].contiguous()
        return torch.softmax(cosines / temperature, dim=-1), experts[:, :k].to(torch.int32), cosines


@torch.no_grad()
def memory_statistics(
    rows: Rows, gates: Tensor, experts: Tensor, num_experts: int, *, normalize: bool = True
) -> tuple[Tensor, Tensor]:
    """:func:`rbm_kernels.memory_statistics`: ``[E, D]`` and ``[E]``, without rows that are not finite."""
    if not isinstance(rows, SparseRows):
        return rbm_kernels.memory_statistics(rows, gates, experts, num_experts, normalize=normalize)
    with full_precision(rows.device):
        return _sparse_memory_statistics(rows, gates, experts, num_experts, normalize)


def _sparse_memory_statistics(
    rows: SparseRows, gates: Tensor, experts: Tensor, num_experts: int, normalize: bool
) -> tuple[Tensor, Tensor]:
    # no_grad does not stop forward-mode tangents.
    gates, rows = gates.detach(), rows if rows.dense is None else rows._with(dense=rows.dense.detach())
    squared = rows.squared_norms()
    usable = squared.isfinite() & gates.isfinite().all(-1)
    weights = torch.where(usable[:, None], gates.exp(), 0.0)
    factors = torch.where(usable, 1 / squared.sqrt().clamp_min(EPS), 0.0) if normalize else usable.to(rows.dtype)
    # The sum over rows of weight * factor * row is the weight gradient of the grouped matmul with one output.
    values = torch.where(rows.spread(usable), rows.values, 0.0)
    one_output = rows.values.new_empty(num_experts, 1, rows.width)
    sums, _ = rbm_kernels.sparse_expert_matmul_backward_weight(
        factors[:, None], rows.crow, rows.col, values, one_output, None, weights, experts
    )
    weighted_sum, total = sums.squeeze(1), dense_gates(weights, experts, num_experts)
    if rows.dense is None:
        return weighted_sum, total.sum(0)
    finite = torch.where(usable[:, None], rows.dense, 0.0) * factors[:, None]
    return torch.cat([weighted_sum, total.T @ finite], dim=1), total.sum(0)


def expert_matmul(
    rows: SparseRows, weight: Tensor, bias: Tensor | None, scale: Tensor | None, gates: Tensor, experts: Tensor
) -> Tensor:
    """:func:`rbm_kernels.expert_matmul` with the weights ``weight * scale[:, None, :]``.

    ``scale [E, D]`` (or a scalar, or None) is applied inside the product, so that no scaled copy of the weight is made.
    Under autocast, the product runs in the dtype of the parameters and only the result is cast, unless it is float64.
    """
    if weight.shape[2] != rows.shape[1]:
        raise ValueError(f"sparse rows have shape {list(rows.shape)}, expected [*, {weight.shape[2]}]")
    scale = None if scale is None else scale.expand(weight.shape[0], weight.shape[2])
    parts = (rows.crow, rows.col, rows.values)
    if rows.dense is None:
        y = rbm_kernels.sparse_expert_matmul(*parts, weight, bias, scale, gates, experts)
    else:
        left, right = weight.split([rows.width, rows.dense.shape[1]], dim=2)
        left_scale = None if scale is None else scale[:, : rows.width]
        right = right if scale is None else right * scale[:, None, rows.width :]
        y = rbm_kernels.sparse_expert_matmul(*parts, left, bias, left_scale, gates, experts)
        y = y + rbm_kernels.expert_matmul(rows.dense, right, None, gates, experts)
    device = rows.device.type
    if y.dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        y = y.to(torch.get_autocast_dtype(device))
    return y


def _shrunk(rows: SparseRows) -> tuple[SparseRows, Tensor]:
    """Rows of the same directions and their squared lengths; rows whose squares might overflow are scaled down."""
    longest, factor = LONG[rows.dtype]
    squared = rows.squared_norms()
    is_long = ~(squared < longest**2)
    if is_eager_on_cpu(squared) and not is_long.any():
        return rows, squared
    factors = torch.where(is_long, factor, squared.new_ones(()))
    dense = None if rows.dense is None else rows.dense * factors[:, None]
    rows = rows._with(values=rows.values * rows.spread(factors), dense=dense)
    return rows, rows.squared_norms()


def _times(rows: SparseRows, values: Tensor, matrix: Tensor) -> Tensor:
    """Product of the sparse columns, with ``values`` as entries, and ``matrix [Ds, N]``."""
    if is_transformed():  # torch.func does not support CSR tensors
        return dense_rows(rows.crow, rows.col, values, rows.width) @ matrix
    return csr(rows.crow, rows.col, values, (rows.shape[0], rows.width)) @ matrix


def _check_sparse(sparse: Tensor) -> None:
    if not isinstance(sparse, Tensor) or sparse.layout != torch.sparse_csr:
        kind = sparse.layout if isinstance(sparse, Tensor) else type(sparse).__name__
        raise TypeError(
            f"sparse features are {kind}, expected a CSR tensor (torch.sparse_csr); use features.to_sparse_csr()"
        )
    if sparse.dim() != 2:
        raise ValueError(f"sparse features have shape {list(sparse.shape)}, expected [rows, features]")
    if sparse.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"sparse features have dtype {sparse.dtype}, expected torch.float32 or torch.float64")
    if sparse.requires_grad:
        raise ValueError("sparse features require a gradient, which none of the operators gives; use features.detach()")
    if sparse.values().shape[0] >= 2**31:
        raise ValueError(f"sparse features hold {sparse.values().shape[0]} entries, expected fewer than 2^31")


def _check_order(crow: Tensor, col: Tensor) -> None:
    falls = col[1:] <= col[:-1]
    # The first entry of a row may fall behind the last of the row before.
    starts = crow[1:-1].long()
    falls[starts[(starts > 0) & (starts < col.shape[0])] - 1] = False
    if falls.any():
        entry = int(falls.nonzero()[0]) + 1
        row = int(torch.searchsorted(crow, entry, right=True)) - 1
        raise ValueError(
            f"sparse features: the columns of row {row} do not ascend (column {int(col[entry])} after"
            f" {int(col[entry - 1])}); sort them and add up repeated ones, for example by features.to_sparse_coo()"
            ".coalesce().to_sparse_csr()"
        )


def _check_dense(dense: Tensor, sparse: Rows) -> None:
    if not isinstance(dense, Tensor) or dense.layout != torch.strided:
        kind = dense.layout if isinstance(dense, Tensor) else type(dense).__name__
        raise TypeError(f"dense features beside sparse ones are {kind}, expected a dense tensor")
    if dense.dim() != 2 or dense.shape[0] != sparse.shape[0]:
        raise ValueError(f"dense features have shape {list(dense.shape)}, expected [{sparse.shape[0]}, features]")
    if dense.dtype != sparse.dtype:
        raise TypeError(f"dense features have dtype {dense.dtype}, expected that of the sparse ones, {sparse.dtype}")

"""Training of a convolutional teacher on one graph that only computes the rows on which loss and accuracies depend.

Three facts save work. They change results only by the order of summation:

* Features are constant, and aggregation and projection commute: ``A (X W^T) = (A X) W^T``. The first layer aggregates
  once for all epochs, whichever of its sides is wider.
* Weights change once per epoch. The next training forward reuses the first layer's product from the evaluation after
  the step.
* The loss is a mean over labelled nodes, and the gradient of a hidden row that reaches none of them is zero. Forward
  and backward only use rows that reach a labelled node: on Amazon Photo, with 160 of 7,650 nodes labelled, these are
  four in ten.

Dropout draws a mask for all rows and applies the part for the rows that are used.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rbm.nn.dropout import dropout
from rbm.nn.first_layer import known_product
from rbm.nn.sparse_rows import Rows, SparseRows
from rbm.teachers.aggregation import KEPT_BYTES, spread
from rbm.teachers.base import ConvTeacher
from rbm.teachers.gcn import GCN
from rbm.teachers.sage import GraphSAGE
from rbm.utils.precision import autocast_dtype, cast_once
from rbm_kernels.ops.sparse_expert_matmul.reference import csr


class LabelledNodes:
    """A teacher on a graph: logits of some nodes for training, and of all nodes for evaluation.

    Args:
        teacher: teacher for which :meth:`serves` is true.
        x: features of all nodes, ``[N, F]``, which must not change.
        adjacency: CSR ``[N, N]``, the result of ``teacher.adjacency``.
        nodes: int64 ``[B]``, the nodes to train on. None if this object is only used for evaluation: then it keeps
            nothing that depends on weights, because a fused Adam changes weights without changing their versions.
    """

    def __init__(self, teacher: ConvTeacher, x: Rows, adjacency: Tensor, nodes: Tensor | None = None) -> None:
        self.teacher, self.x, self.adjacency = teacher, x, adjacency
        # Sparse rows are projected before they are summed, because their sums would be dense.
        self.aggregated = None if isinstance(x, SparseRows) else spread(adjacency, x)
        self._known: tuple[Any, Tensor] | None = None
        self.trains = nodes is not None
        if not self.trains:
            return
        # reached[i] are the rows of layer i's output on which the logits of the nodes depend; parts[i] aggregates them
        # to the rows of the next layer.
        self.reached, self.parts = [nodes], []
        for _ in teacher.convs[1:]:
            self._go_back()
        if self.aggregated is None:
            self._go_back()
            self.rows, self.first_part = x[self.reached.pop(0)], self.parts.pop(0)
        else:
            self.rows = self.aggregated[self.reached[0]]

    @staticmethod
    def serves(teacher: nn.Module, x: object, adjacency: object) -> bool:
        """Whether the rows of this teacher only depend on their neighbours, and its features are small enough to keep
        their aggregation as well.

        With BatchNorm each row depends on all others. On a GPU, dropout would draw different masks.
        """
        return (
            type(teacher) in (GraphSAGE, GCN)
            and not any(isinstance(norm, nn.BatchNorm1d) for norm in teacher.norms)
            and isinstance(adjacency, Tensor)
            and (isinstance(x, SparseRows) or (isinstance(x, Tensor) and x.nbytes <= KEPT_BYTES))
            and x.device.type == "cpu"
        )

    @torch.no_grad()
    def all_logits(self) -> Tensor:
        """Logits of all nodes, ``[N, C]``; the teacher must be in eval mode."""
        if self.aggregated is None:
            return self.teacher(self.x, self.adjacency)
        _, *others = self.teacher.convs
        h = self._first_product()
        if not self.trains:
            self._known = None
        for layer, conv in enumerate(others):
            _, h = self.teacher.hidden(layer, h)
            h = conv(h, self.adjacency)
        return h

    def logits(self) -> Tensor:
        """Logits of the nodes to train on, ``[B, C]``, with gradients."""
        teacher, count = self.teacher, self.adjacency.shape[0]
        h = self._first_layer()
        for layer, (conv, rows, part) in enumerate(zip(teacher.convs[1:], self.reached, self.parts, strict=False)):
            _, h = teacher.hidden(layer, h)
            h = conv(dropout(h, teacher.dropout.p, teacher.training, rows=rows, count=count), part)
        return h

    def _first_layer(self) -> Tensor:
        """The first layer's output for the rows that reach the nodes to train on."""
        conv, reached = self.teacher.convs[0], self.reached[0]
        if self.aggregated is None:
            return conv(self.rows, self.first_part)
        with torch.no_grad():
            known = self._first_product().index_select(0, reached)  # several times as fast as [reached]
        self._known = None  # the next step changes the weights
        return known_product(*conv.transformation(), cast_once(self.rows), known)

    def _first_product(self) -> Tensor:
        """The first layer's output for all rows, ``[N, H]``, reused unless its parameters or its dtype have changed."""
        conv = self.teacher.convs[0]
        weight, bias = conv.transformation()
        versions = weight._version, bias._version, autocast_dtype(self.aggregated, weight.dtype)
        if self._known is None or self._known[0] != versions:
            self._known = versions, conv.transform(cast_once(self.aggregated))
        return self._known[1]

    def _go_back(self) -> None:
        """Add the rows and the submatrix of one more layer towards the features."""
        self.reached.insert(0, nonzero_columns(self.adjacency, self.reached[0]))
        self.parts.insert(0, submatrix(self.adjacency, self.reached[1], self.reached[0]))


def nonzero_columns(adjacency: Tensor, rows: Tensor) -> Tensor:
    """The columns in which given rows of a CSR matrix have entries, int64, ascending."""
    entries, _ = _entries(adjacency, rows)
    found = torch.zeros(adjacency.shape[1], dtype=torch.bool)
    found[adjacency.col_indices()[entries]] = True
    return found.nonzero().flatten()


def submatrix(adjacency: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The CSR submatrix of int64 rows and ascending int64 columns, which must include all entries of these rows."""
    entries, crow = _entries(adjacency, rows)
    place = torch.zeros(adjacency.shape[1], dtype=torch.int64)
    place[columns] = torch.arange(len(columns))
    col = place[adjacency.col_indices()[entries]]
    parts = (part.to(adjacency.col_indices().dtype) for part in (crow, col))
    return csr(*parts, adjacency.values()[entries], (len(rows), len(columns)))


def _entries(adjacency: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the rows' entries among all entries of a CSR matrix, and the start of each row in this list."""
    crow = adjacency.crow_indices()
    counts = crow.diff()[rows]
    own = F.pad(counts.cumsum(0), (1, 0))
    places = torch.arange(int(own[-1])) + torch.repeat_interleave(crow[rows] - own[:-1], counts)
    return places, own

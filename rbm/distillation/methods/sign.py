r"""SIGN: an MLP on features and their means one, two, ... hops away, computed once and stored (Frasca et al., SIGN:
Scalable Inception Graph Neural Networks, 2020). With one layer it is SGC on all hops (Wu et al., Simplifying Graph
Convolutional Networks, ICML 2019).

.. math:: q_v = MLP\big(x_v, (M x)_v, \dots, (M^K x)_v\big), \quad
    L = \lambda \, CE(q_v, y_v) + (1 - \lambda) \, KL(p_v \,\|\, q_v)

It is not a distilled student: by default it learns only from labels (:math:`\lambda = 1`). Prediction runs no GNN. A
row needs the node's stored hops. For a new node these are means over the stored hops of its neighbours
(:mod:`rbm.datasets.encodings.hops`), which reads the edges of the new node but not those of its neighbours.

Differences from the publication: the only operator is the mean over neighbours, whereas SIGN also uses powers of
PageRank and triangles. The first layer is the sum of one linear map per hop, whereas SIGN concatenates their outputs.
Neither publication has settings for these graphs and labels; the defaults are ours. Full batch. On sparse features, the
first layer is computed without the dense hops (:class:`PropagatedLayer`).
"""

import torch
from torch import Tensor, nn
from torch_geometric.utils import remove_self_loops

from rbm.config import SIGNConfig
from rbm.datasets.encodings import Encodings
from rbm.datasets.encodings.grown import GrownGraph
from rbm.datasets.encodings.hops import hop_encodings
from rbm.datasets.splits import GraphSplit
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.distillation.trainer import NodeTrainer
from rbm.nn import losses
from rbm.nn.sparse_rows import Rows, SparseRows, linear
from rbm.nn.students import SIGNStudent
from rbm.teachers.aggregation import aggregate, sparse_adjacency
from rbm.teachers.outputs import TeacherOutputs


class PropagatedLayer:
    r"""The first layer's output on all nodes of a graph with sparse features, by narrow products instead of wide hops:

    .. math:: X W_0 + (M X) W_1 + \dots + (M^K X) W_K = X W_0 + M \big(X W_1 + \dots + M (X W_K)\big)

    ``M X`` is dense and has ``F`` columns. Here ``X`` stays sparse, and only ``X W_k``, as wide as the layer, is
    propagated in each pass.

    Args:
        rows: sparse features of all nodes, ``[N, F]``.
        edge_index: int64 ``[2, M]``; self-loops do not count.
        hops: K, at least 1.
        givers: bool ``[N]``, the nodes whose outgoing edges count; by default all.
    """

    def __init__(self, rows: SparseRows, edge_index: Tensor, hops: int, givers: Tensor | None = None) -> None:
        self.rows, self.hops = rows, hops
        edges, _ = remove_self_loops(edge_index)
        if givers is not None:
            edges = edges[:, givers[edges[0]]]
        degrees = torch.bincount(edges[1], minlength=rows.shape[0])
        self.means = sparse_adjacency(edges, 1 / degrees[edges[1]].float(), rows.shape[0])

    def __call__(self, layer: nn.Linear) -> Tensor:
        """``[N, H]``, what ``layer`` computes from the features and their hops."""
        width = self.rows.shape[1]
        weights = layer.weight.unflatten(1, (self.hops + 1, width)).transpose(0, 1).flatten(0, 1)
        *parts, total = linear(self.rows, weights).unflatten(1, (self.hops + 1, -1)).unbind(1)
        for part in reversed(parts):
            total = part + aggregate(self.means, total)
        return total if layer.bias is None else total + layer.bias


class SIGNTrainer(NodeTrainer):
    """One step per epoch on the labels and, if they have a weight, the soft labels of all observed nodes."""

    def __init__(
        self,
        model: SIGNStudent,
        split: GraphSplit,
        teacher_outputs: TeacherOutputs,
        config: SIGNConfig,
        encodings: Encodings | None,
    ) -> None:
        super().__init__(model, split, config, encodings)
        self.teacher_outputs, self.weight = teacher_outputs, config.label_weight
        self.labelled_x = self.observed_x[self.train_nodes]
        self.observed_layer = self.full_layer = None
        if config.hops > 0 and isinstance(split.observed_rows, SparseRows):
            graph, observed = split.graph, split.observed
            self.observed_layer = self.full_layer = PropagatedLayer(
                split.observed_rows, observed.edge_index, config.hops
            )
            if len(split.unseen_nodes):
                seen = torch.zeros(graph.num_nodes, dtype=torch.bool, device=graph.edge_index.device)
                seen[split.observed_nodes] = True
                self.full_layer = PropagatedLayer(split.full_rows, graph.edge_index, config.hops, seen)

    def logits_of(self, rows: Rows, layer: PropagatedLayer | None) -> Tensor:
        """Logits of all nodes of a graph ``[N, C]``, with the first layer's output from ``layer``, if given."""
        return self.model(rows, first=None if layer is None else layer(self.model.layers[0]))

    def all_logits(self) -> Tensor:
        if self.full_layer is None:
            return super().all_logits()
        return self.forward(self.logits_of, self.full_x, self.full_layer)

    def epoch_loss(self, epoch: int) -> Tensor:
        if self.weight == 1:
            logits = self.forward(self.model, self.labelled_x)
            return losses.hard_label_loss(logits, self.split.observed.y[self.train_nodes])
        logits = self.forward(self.logits_of, self.observed_x, self.observed_layer)
        soft = losses.soft_label_loss(logits, self.teacher_outputs.soft_labels)
        return self.weight * self.labelled_loss(logits) + (1 - self.weight) * soft


def hops_on(grown: GrownGraph) -> Tensor:
    """Stored hops of all nodes of a grown graph; a new node's are means over the nodes that training saw."""
    return hop_encodings(grown.split, grown.config.sign.hops).full


def train_sign(task: DistillationTask) -> TrainedStudent:
    """Train an MLP on features and stored hops."""
    config = task.config.sign
    encodings = hop_encodings(task.split, config.hops)
    student = task.new_student(SIGNStudent, config, encodings)
    trainer = SIGNTrainer(student, task.split, task.teacher_outputs, config, encodings)
    return TrainedStudent(student, task.fit("sign", trainer, config), encodings)

r"""CoHOp: a student without a teacher that gets a histogram of the labels near each node as input (Winter et al.,
Classifying Nodes in Graphs without GNNs, 2024).

.. math:: L = CE + \gamma \operatorname{mean}_v \operatorname{mean}_{u \to v} \Big( -\sum_c q_{vc} \log q_{uc} \Big)

The input is the features and the histogram ``H_i``: the classes of labelled nodes near ``i``, weighted by
``r ^ distance``. Unlike the other methods, CoHOp trains in rounds. After each round, predictions are smoothed along the
edges: ``s q_v + (1 - s) mean_u q_u``. Nodes with a sufficiently confident class become pseudo-labels of the next round,
in addition to the true labels. ``s`` is the share with the best validation accuracy, anew in each round, as in the
released code. Pseudo-labels, and thus the weights of later rounds, therefore depend on validation labels. The round is
selected on the same nodes. Prediction needs neither smoothing nor edges. Unseen nodes are evaluated with their
histograms in the full graph; a node that arrives later gets the mean of its neighbours'
(:func:`rbm.datasets.encodings.transfer`), which differs.
"""

from dataclasses import replace

import numpy as np
import torch
from scipy.sparse.csgraph import dijkstra
from torch import Tensor
from torch.nn import functional as F

from rbm.config import CoHOpConfig
from rbm.datasets.encodings import Encodings, label_propagation
from rbm.datasets.encodings.graph import in_matrix
from rbm.datasets.encodings.grown import GrownGraph
from rbm.datasets.splits import GraphSplit
from rbm.distillation.soft_targets import Neighborhood
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.distillation.trainer import NodeTrainer
from rbm.nn import losses
from rbm.nn.students import CoHOpStudent
from rbm.training.metrics import accuracy

_EXACT_ENTRIES = 50_000_000
_SMOOTHINGS = torch.linspace(0.0, 1.0, 101, dtype=torch.float32, device="cpu")


def label_histograms(
    edge_index: Tensor, labels: Tensor, train_mask: Tensor, num_classes: int, config: CoHOpConfig
) -> Tensor:
    """Share of each class among the labelled nodes near a node, ``[N, C]`` in float32; rows sum to almost 1, or to 0.

    ``H_i = sum_j r ^ dist(j, i) onehot(y_j)``, divided by its sum, over labelled ``j`` at most ``config.hops`` edges
    away, including ``i`` itself. Large graphs use powers of the random walk instead of distances
    (:func:`rbm.datasets.encodings.label_propagation`, with one hop less).

    Args:
        edge_index: int64 ``[2, M]``; self-loops are ignored.
        labels: int64 ``[N]``, read only under ``train_mask``.
        train_mask: bool ``[N]``.
        num_classes: C.
        config: ``smoothing_radius`` is ``r``.
    """
    nodes, num_nodes = train_mask.nonzero().flatten().cpu(), labels.shape[0]
    if not _is_exact(config, len(nodes), num_nodes):
        return label_propagation(
            edge_index, labels, train_mask, num_classes, decay=config.smoothing_radius, hops=max(1, config.hops - 1)
        )
    sources, targets = edge_index[:, edge_index[0] != edge_index[1]].cpu().numpy()
    graph = in_matrix(targets, sources, (num_nodes, num_nodes), np.float32)
    distances = dijkstra(graph, indices=nodes.numpy(), unweighted=True, limit=config.hops)
    weights = np.where(np.isfinite(distances), config.smoothing_radius**distances, 0.0)
    onehot = F.one_hot(labels.cpu()[nodes], num_classes).double().numpy()
    histograms = weights.T @ onehot
    return torch.from_numpy(histograms / (histograms.sum(1, keepdims=True) + 1e-6)).float()


def _is_exact(config: CoHOpConfig, labelled: int, nodes: int) -> bool:
    """Whether histograms are exact; with ``auto``, unless their table of distances has too many entries."""
    return config.histogram == "exact" or (config.histogram == "auto" and labelled * nodes <= _EXACT_ENTRIES)


def histogram_encodings(split: GraphSplit, num_classes: int, config: CoHOpConfig) -> Encodings | None:
    """Histograms of observed nodes in the observed graph and of unseen nodes in the full graph, both from the observed
    training labels only. None if ``config.histogram`` is ``none``.
    """
    if config.histogram == "none":
        return None
    config, observed = with_histogram(config, split), split.observed
    rows = label_histograms(observed.edge_index, observed.y, observed.train_mask, num_classes, config)
    if not len(split.unseen_nodes):
        return Encodings(rows, rows)
    nodes = split.observed_nodes.cpu()
    mask = torch.zeros(split.graph.num_nodes, dtype=torch.bool)
    mask[nodes[observed.train_mask.cpu()]] = True
    full = label_histograms(split.graph.edge_index, split.graph.y, mask, num_classes, config)
    full[nodes] = rows
    return Encodings(rows, full)


def with_histogram(config: CoHOpConfig, split: GraphSplit) -> CoHOpConfig:
    """The settings, of a student with histograms, with the kind that ``auto`` stands for on this graph."""
    exact = _is_exact(config, int(split.observed.train_mask.sum()), split.graph.num_nodes)
    return replace(config, histogram="exact" if exact else "propagation")


def histograms_on(grown: GrownGraph) -> Tensor:
    """Histograms ``[M, C]`` of all nodes of a grown graph, of the same kind as in training."""
    config = with_histogram(grown.config.cohop, grown.trained)
    return histogram_encodings(grown.split, grown.num_classes, config).full


def contrast_loss(log_probabilities: Tensor, graph: Neighborhood) -> Tensor:
    """Mean over nodes of the mean cross-entropy between the predictions of a node and of its in-neighbours."""
    # The derivative of indexing gives the same bits and takes longer, on one thread half as long again.
    sources, targets = (log_probabilities.index_select(0, ends) for ends in (graph.sources, graph.targets))
    degrees = graph.crow.diff().clamp_min(1)
    cross_entropies = -(targets.exp() * sources).sum(-1)
    return (cross_entropies / degrees[graph.targets]).sum() / graph.num_nodes


class CoHOpTrainer(NodeTrainer):
    """One round of training on the labels so far, with a contrast loss on neighbours. Full batch."""

    def __init__(
        self, model: CoHOpStudent, split: GraphSplit, config: CoHOpConfig, encodings: Encodings | None, labels: Tensor
    ) -> None:
        super().__init__(model, split, config, encodings)
        self.config = config
        self.graph = Neighborhood(split.observed.edge_index, split.observed.num_nodes)
        self.labels = labels
        self.labelled = (labels >= 0).nonzero().flatten()

    def epoch_loss(self, epoch: int) -> Tensor:
        logits = self.forward(self.model, self.observed_x)
        loss = losses.hard_label_loss(logits[self.labelled], self.labels[self.labelled])
        if self.config.contrast_weight > 0:
            loss = loss + self.config.contrast_weight * contrast_loss(logits.log_softmax(-1), self.graph)
        return loss

    @torch.no_grad()
    def next_labels(self) -> Tensor:
        """Pseudo-labels of the observed nodes, ``[N]``; -1 if the smoothed prediction is not confident enough."""
        observed, graph = self.split.observed, self.graph
        predicted = self.model(self.observed_x).softmax(-1)
        truth = observed.y[self.train_nodes]
        predicted[self.train_nodes] = F.one_hot(truth, predicted.shape[1]).to(predicted.dtype)
        neighbor_mean = torch.zeros_like(predicted).index_add_(0, graph.targets, predicted[graph.sources])
        neighbor_mean /= graph.crow.diff().clamp_min(1)[:, None]

        known, own, others = (part[observed.val_mask] for part in (observed.y, predicted, neighbor_mean))
        scores = [accuracy(share * own + (1 - share) * others, known) for share in _SMOOTHINGS.tolist()]
        share = float(_SMOOTHINGS[int(np.argmax(scores))])
        confidence, labels = (share * predicted + (1 - share) * neighbor_mean).max(-1)
        labels = labels.masked_fill(confidence <= self.config.threshold, -1)
        labels[self.train_nodes] = truth
        return labels


def train_cohop(task: DistillationTask) -> TrainedStudent:
    """Train in rounds and keep the round with the best validation accuracy."""
    config, split = task.config.cohop, task.split
    encodings = histogram_encodings(split, task.classes, config)
    student = task.new_student(CoHOpStudent, config, encodings)
    observed = split.observed
    labels = torch.where(observed.train_mask, observed.y, -1)
    best, state, epochs, test_max = None, {}, 0, 0.0
    for number in range(config.rounds):
        task.seed(1 + number)  # a round that is loaded from the run folder draws no random numbers
        trainer = CoHOpTrainer(student, split, config, encodings, labels)
        result = task.fit(f"cohop-{number}", trainer, config)
        labels = trainer.next_labels()
        if best is None or result["val_accuracy"] > best["val_accuracy"]:
            best = {**result, "best_epoch": epochs + result["best_epoch"]}
            state = {name: tensor.clone() for name, tensor in student.state_dict().items()}
        epochs, test_max = epochs + result["epochs"], max(test_max, result["test_max"])
    student.load_state_dict(state)
    return TrainedStudent(student, {**best, "epochs": epochs, "test_max": test_max}, encodings)

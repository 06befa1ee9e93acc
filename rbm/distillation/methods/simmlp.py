r"""SimMLP: an MLP that is aligned with its neighbourhood without labels, then a linear head (Wang et al., Training MLPs
on Graphs without Supervision, WSDM 2025).

A GNN propagates the rows that the MLP ``f`` computes: GCN's normalised adjacency, then PReLU and a norm in each step,
without weight matrices. The loss aligns MLP and GNN on features ``x~`` and edges ``A~`` from which a random part is
removed. Together with the reconstruction of the features, this keeps the MLP from mapping all nodes to the same row:

.. math:: h_v = GNN\big(f(\tilde x), \tilde A\big)_v, \quad
    L = \operatorname{mean}_v \big(1 - \cos(\rho(f(\tilde x_v)), \operatorname{sg} h_v)\big)^\eta
    + \gamma \operatorname{mean}_v \operatorname{mean}_i \big(d(h_v) - x_v\big)_i^2

with a predictor ``rho`` and a decoder ``d``, both MLPs, and no gradient through ``sg``. For sparse features the second
term is computed without the rows ``d(h)`` (:mod:`rbm.nn.reconstruction`). Then the MLP is frozen, and a linear head
learns the labels from its rows, which have length one. No teacher is used. Full batch, features only.

Differences from the released code (Zehong-Wang/SimMLP): its published figures use a tenth of the nodes as labels (for
Cora twice as many as here), and it selects the epoch with the best *test* accuracy among every hundredth. Here the
epoch of alignment is selected on validation nodes, each assigned to the class whose labelled nodes have the nearest
mean, and the head's epoch by its own validation accuracy. The released code can also mix views into additional pairs,
which its published settings do not use.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rbm.config import SimMLPConfig
from rbm.datasets.splits import GraphSplit
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.distillation.trainer import NodeTrainer
from rbm.nn import losses
from rbm.nn.cpu_derivatives import PReLU, unit_rows
from rbm.nn.reconstruction import SparseTarget
from rbm.nn.simmlp import NormalizedMLP, SimMLPStudent
from rbm.nn.sparse_rows import Rows, SparseRows, in_single_precision, to_dense
from rbm.nn.students import build_norm, layer_sizes
from rbm.teachers import GCN
from rbm.teachers.aggregation import aggregate
from rbm.training.selection import Accuracies, split_accuracies


def masked(rows: Rows, share: float) -> Rows:
    """Rows with each number set to zero with probability ``share``; the others are not rescaled."""
    if share == 0:
        return rows
    if isinstance(rows, SparseRows):
        kept = torch.rand_like(rows.values) >= share
        dense = None if rows.dense is None else masked(rows.dense, share)
        return rows._with(values=rows.values * kept, dense=dense)
    return rows * (torch.rand_like(rows) >= share)


def alignment_loss(predicted: Tensor, aggregated: Tensor, power: float) -> Tensor:
    """Mean over rows of ``(1 - cos)^power``; no gradient flows into ``aggregated``. Both ``[N, H]``."""
    with torch.no_grad():
        aggregated = unit_rows(aggregated)
    distance = 1 - torch.linalg.vecdot(unit_rows(predicted), aggregated)
    # A power below one has no finite slope at zero, the distance of rows that have become equal.
    return distance.clamp_min(torch.finfo(distance.dtype).eps if power < 1 else 0).pow(power).mean()


class Aggregator(nn.Module):
    """Propagation with PReLU and a norm after each step, without weight matrices."""

    def __init__(self, channels: int, num_layers: int, norm: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList(build_norm(norm, channels) for _ in range(num_layers))
        self.activation = PReLU()

    def forward(self, rows: Tensor, adjacency: Tensor) -> Tensor:
        """``[N, H]`` from ``[N, H]`` and a normalised adjacency ``[N, N]``."""
        for norm in self.norms:
            rows = norm(self.activation(aggregate(adjacency, rows)))
        return rows


class AlignmentTrainer(NodeTrainer):
    """One step per epoch on all observed nodes without labels. Labels are only used to select the epoch."""

    def __init__(self, model: SimMLPStudent, split: GraphSplit, config: SimMLPConfig) -> None:
        super().__init__(model, split, config, None)
        self.config = config
        self.rows = in_single_precision(self.observed_x)
        self.full_rows = in_single_precision(self.full_x)
        width, device = model.head.in_features, self.rows.device
        self.aggregator = Aggregator(width, config.propagation_layers, config.norm).to(device)
        predictor = layer_sizes(width, config.predictor_channels, width, config.predictor_layers)
        self.predictor: nn.Module = nn.Linear(width, width)
        if config.predictor_layers > 1:
            self.predictor = NormalizedMLP(predictor, norm=config.norm, dropout=config.predictor_dropout)
        self.predictor.to(device)
        self.decoder: nn.Module | None = None
        if config.reconstruction_weight > 0:
            self.decoder = NormalizedMLP([(width, width), (width, self.rows.shape[1])]).to(device)
            is_sparse = isinstance(self.rows, SparseRows) and self.rows.dense is None
            self.target = SparseTarget(self.rows) if is_sparse else None
            self.features = None if is_sparse else to_dense(self.rows)

    @property
    def auxiliary_modules(self) -> nn.ModuleList:
        """Modules that are trained together with the MLP and then discarded."""
        return nn.ModuleList([self.aggregator, self.predictor, *([] if self.decoder is None else [self.decoder])])

    def build_optimizer(self) -> torch.optim.Optimizer:
        learning = [*self.model.encoder.parameters(), *self.auxiliary_modules.parameters()]
        return torch.optim.AdamW(learning, lr=self.config.lr, weight_decay=self.config.weight_decay, fused=True)

    def train_epoch(self, epoch: int) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * (1 + math.cos(math.pi * epoch / self.config.max_epochs)) / 2
        return super().train_epoch(epoch)

    def epoch_loss(self, epoch: int) -> Tensor:
        return self.loss(masked(self.rows, self.config.feature_mask), self.draw_edges())

    def draw_edges(self) -> Tensor:
        """The normalised adjacency of a random part of the edges."""
        observed = self.split.observed
        kept = torch.rand(observed.edge_index.shape[1], device=self.rows.device) >= self.config.edge_mask
        return GCN.adjacency(observed.edge_index[:, kept], observed.num_nodes, self.rows.dtype)

    def loss(self, rows: Rows, adjacency: Tensor) -> Tensor:
        """The loss on masked rows ``[N, F]`` and the adjacency ``[N, N]`` of the remaining edges."""
        encoded = self.forward(self.model.encoder, rows)
        aggregated = self.aggregator(encoded, adjacency)
        loss = alignment_loss(self.forward(self.predictor, encoded), aggregated, self.config.power)
        if self.decoder is not None:
            loss = loss + self.config.reconstruction_weight * self.reconstruction_loss(aggregated)
        return loss

    def reconstruction_loss(self, aggregated: Tensor) -> Tensor:
        """Mean squared difference between the decoder's unit rows, from ``aggregated [N, H]``, and the features."""
        if self.target is None:
            return F.mse_loss(self.forward(self.decoder, aggregated), self.features)
        return self.target.loss(self.forward(self.decoder.before_last, aggregated), self.decoder.layers[-1])

    @torch.no_grad()
    def evaluate(self) -> Accuracies:
        rows, split = self.forward(self.model.encoder, self.full_rows), self.split
        observed = split.of_observed(rows)
        labels = split.observed.y[self.train_nodes]
        means = rows.new_zeros(self.model.head.out_features, rows.shape[1])
        means.index_add_(0, labels, observed[self.train_nodes])
        scores = rows @ F.normalize(means, dim=-1).T
        scores[:, torch.bincount(labels, minlength=len(means)) == 0] = -torch.inf  # a class without a mean
        return split_accuracies(split.of_observed(scores), scores, split)

    def state(self) -> dict[str, Any]:
        return self.auxiliary_modules.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        self.auxiliary_modules.load_state_dict(state)


class HeadTrainer(NodeTrainer):
    """Trains the head on the MLP's fixed rows of the labelled nodes, one step per epoch."""

    def __init__(self, model: SimMLPStudent, split: GraphSplit, config: SimMLPConfig) -> None:
        super().__init__(model, split, config, None)
        self.config = config
        with torch.no_grad():
            model.eval()
            self.encoded = model.encoder(in_single_precision(self.full_x))
        self.labelled = self.encoded[split.observed_nodes.to(self.encoded.device)[self.train_nodes]]

    def build_optimizer(self) -> torch.optim.Optimizer:
        settings = {"lr": self.config.head_lr, "weight_decay": self.config.head_weight_decay}
        return torch.optim.AdamW(self.model.head.parameters(), **settings, fused=True)

    def epoch_loss(self, epoch: int) -> Tensor:
        logits = self.forward(self.model.head, self.labelled)
        return losses.hard_label_loss(logits, self.split.observed.y[self.train_nodes])

    @torch.no_grad()
    def evaluate(self) -> Accuracies:
        logits = self.forward(self.model.head, self.encoded)
        return split_accuracies(self.split.of_observed(logits), logits, self.split)


def train_simmlp(task: DistillationTask) -> TrainedStudent:
    """Align an MLP with its neighbourhoods, then fit a linear head on its rows."""
    config = task.config.simmlp
    student = task.new_student(SimMLPStudent, config)
    aligned = task.fit("simmlp-alignment", AlignmentTrainer(student, task.split, config), config)
    task.seed(1)  # alignment that is loaded from the run folder draws no random numbers
    nn.init.xavier_uniform_(student.head.weight)
    nn.init.zeros_(student.head.bias)
    head = replace(config, max_epochs=config.head_epochs, patience=config.head_patience, min_epochs=0)
    found = task.fit("simmlp", HeadTrainer(student, task.split, head), head)
    epochs = aligned["epochs"]
    result = {**found, "best_epoch": epochs + found["best_epoch"], "epochs": epochs + found["epochs"]}
    return TrainedStudent(student, result, None)

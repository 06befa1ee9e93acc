r"""Gradient-boosted trees on features and encodings: the usual baseline for tabular data.

scikit-learn's HistGradientBoostingClassifier grows them (Friedman, Greedy Function Approximation, 2001; histograms as
in LightGBM, Ke et al., 2017). Each round adds one tree per class, and the number of rounds is selected on validation
nodes like the epoch of other methods. The targets are the true classes of the labelled nodes and, with ``targets =
"teacher"``, the teacher's most likely class of every other observed node. The resulting model consists of standard
operators (:class:`rbm.nn.trees.TreesStudent`) and does not need scikit-learn. Settings are ours.
"""

import numpy as np
import torch
from torch import Tensor

from rbm.config import TreesConfig
from rbm.datasets.encodings import Encodings
from rbm.datasets.splits import GraphSplit
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.distillation.trainer import student_inputs
from rbm.nn.sparse_rows import to_dense
from rbm.nn.trees import TreesStudent
from rbm.teachers.outputs import TeacherOutputs
from rbm.training.loop import Trainer
from rbm.training.selection import Accuracies, split_accuracies

# Each call of scikit-learn bins all features again, which takes as long as several rounds.
_ROUNDS_AT_ONCE = 10


class TreesTrainer(Trainer):
    """Trainer of boosted trees; an epoch is a round of boosting."""

    follows_precision = False

    def __init__(
        self,
        split: GraphSplit,
        teacher_outputs: TeacherOutputs,
        config: TreesConfig,
        encodings: Encodings | None,
        *,
        classes: int,
        seed: int,
    ) -> None:
        self.split, self.config = split, config
        observed_x, full_x = student_inputs(split, encodings)
        self.full_x = to_dense(full_x).float()
        labels = split.observed.y
        nodes = split.observed.train_mask.nonzero().flatten()
        if config.targets == "teacher":
            labels = torch.where(split.observed.train_mask, labels, teacher_outputs.soft_labels.argmax(-1))
            nodes = torch.arange(len(labels), device=labels.device)
        self.y = labels[nodes].cpu().numpy()
        self.classes = np.unique(self.y)
        outputs = len(self.classes) if len(self.classes) > 2 else 1
        fewest = min(config.min_samples, max(1, len(self.y) // 2))
        rows = to_dense(observed_x[nodes]).float().cpu().numpy()
        self.columns = splittable_columns(rows, fewest)
        self.x = rows[:, self.columns]
        # Memory for trees as large as these nodes and this depth allow; leaves alone may ask for a thousand times more.
        leaves = min(config.leaves, 2**config.depth, max(1, len(self.y) // fewest))
        self.model = TreesStudent(
            self.full_x.shape[1],
            classes,
            rounds=config.max_epochs,
            outputs=outputs,
            nodes=config.max_epochs * outputs * (2 * leaves - 1),
            depth=config.depth,
        ).to(self.full_x.device)
        from sklearn.ensemble import HistGradientBoostingClassifier  # takes most of a second to import

        self.boosting = HistGradientBoostingClassifier(
            learning_rate=config.lr,
            max_leaf_nodes=config.leaves,
            max_depth=config.depth,
            min_samples_leaf=fewest,
            l2_regularization=config.l2,
            early_stopping=False,
            warm_start=True,
            random_state=seed,
        )
        self.rounds, self.node_counts = 0, []
        self.model.begin(np.zeros(outputs), self.classes)
        self.scores: Tensor = self.full_x.new_zeros(len(self.full_x), outputs)

    def build_optimizer(self) -> torch.optim.Optimizer:
        # Checkpoints require an optimiser; the only state of boosting is its trees.
        return torch.optim.SGD([self.model.baseline], lr=0.0)

    def train_epoch(self, epoch: int) -> float:
        self._grow(epoch + 1)
        logits = self.split.of_observed(self._logits())
        labelled = self.split.observed.train_mask
        return torch.nn.functional.cross_entropy(logits[labelled], self.split.observed.y[labelled]).item()

    @torch.no_grad()
    def evaluate(self) -> Accuracies:
        logits = self._logits()
        return split_accuracies(self.split.of_observed(logits), logits, self.split)

    def resume_at(self, epoch: int) -> None:
        # The trees are grown again: scikit-learn has no file format for its own state that can be read safely.
        self._grow(epoch)

    def _logits(self) -> Tensor:
        return self.model.baseline + self.scores @ self.model.share

    def _grow(self, rounds: int) -> None:
        """Grow trees up to this number of rounds. A round does not depend on which process grew the earlier ones."""
        while self.rounds < rounds and len(self.classes) > 1:
            if self.rounds % _ROUNDS_AT_ONCE == 0:
                self.boosting.max_iter = min(self.rounds + _ROUNDS_AT_ONCE, self.config.max_epochs)
                self.boosting.fit(self.x, self.y)
            trees = [predictor.nodes.copy() for predictor in self.boosting._predictors[self.rounds]]
            for tree in trees:
                tree["feature_idx"] = self.columns[tree["feature_idx"]]
            if self.rounds == 0:
                self.model.begin(self.boosting._baseline_prediction.ravel(), self.classes)
            self.node_counts.append(self.model.add(self.rounds, trees, self.node_counts[-1] if self.node_counts else 0))
            self.scores = self.scores + self.model.scores(self.full_x, self.rounds, self.rounds + 1)
            self.rounds += 1


def splittable_columns(rows: np.ndarray, fewest: int) -> np.ndarray:
    """The columns of ``rows [n, F]`` in which a threshold leaves at least ``fewest`` rows on either side, int64; the
    first one if there are none.

    No tree splits at another column, since a part of the rows has fewer on a side than all rows. scikit-learn searches
    all columns at each node, and most columns of word counts differ from zero in a few rows only.
    """
    ends = np.partition(rows, (fewest - 1, len(rows) - fewest), axis=0)
    columns = np.flatnonzero(ends[fewest - 1] < ends[len(rows) - fewest])
    return columns if len(columns) else np.zeros(1, dtype=np.int64)


def train_trees(task: DistillationTask) -> TrainedStudent:
    """Grow trees on features and the encodings of the section ``encoding``."""
    config = task.config.trees
    encodings = task.encode(task.config.encoding)
    seed = task.config.seed
    trainer = TreesTrainer(task.split, task.teacher_outputs, config, encodings, classes=task.classes, seed=seed)
    # The phase is not called "trees": the file of that name stores only the rounds that are kept.
    result = task.fit("trees-rounds", trainer, config)
    student = trainer.model
    rounds = result["best_epoch"] + 1
    return TrainedStudent(student.trimmed(rounds, _nodes_of(student, rounds)), result, encodings)


def _nodes_of(student: TreesStudent, rounds: int) -> int:
    """Number of nodes in the first rounds: the root of the next tree or, for the last round, the largest index."""
    trees = rounds * student.outputs
    later = student.roots[trees : trees + 1]
    if len(later) and int(later[0]) > 0:
        return int(later[0])
    last = int(student.roots[trees - 1])
    return int(torch.cat([student.left[last:], student.right[last:]]).max()) + 1

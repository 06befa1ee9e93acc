"""The best epoch of a training: which epochs may be selected, which one is, and when the training ends."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

from rbm.config import Network
from rbm.datasets.splits import GraphSplit
from rbm.training.metrics import accuracy


class Accuracies(NamedTuple):
    """Shares of right predictions, in [0, 1]."""

    train: float
    val: float
    test: float


def split_accuracies(observed_logits: Tensor, full_logits: Tensor, split: GraphSplit) -> Accuracies:
    """Train and validation accuracy on the observed graph; test accuracy on the unseen nodes, or on the test nodes if
    none are unseen. Classes may be given instead of logits, see :func:`rbm.training.metrics.accuracy`.
    """
    observed, full = split.observed, split.graph
    test = split.unseen_nodes if len(split.unseen_nodes) else full.test_mask
    return Accuracies(
        accuracy(observed_logits[observed.train_mask], observed.y[observed.train_mask]),
        accuracy(observed_logits[observed.val_mask], observed.y[observed.val_mask]),
        accuracy(full_logits[test], full.y[test]),
    )


@dataclass
class Result:
    """Result of a training. ``test_accuracy`` is that of the epoch with the best validation accuracy.

    ``test_max`` is the maximum over epochs, which the released code reports. It depends on test labels and is only for
    comparison with the paper.
    """

    val_accuracy: float = -1.0
    test_accuracy: float = 0.0
    test_max: float = 0.0
    best_epoch: int = 0
    epochs: int = 0


@dataclass(frozen=True)
class EpochLimits:
    """How many epochs a training has, and which of them may be selected.

    Attributes:
        max_epochs: epochs after the ``warmup``.
        patience: stop after this many epochs without a validation accuracy at least as good as the best.
        warmup: number of first epochs that do not count for stopping and are not selected (pretraining).
        select_warmup: allow epochs of the ``warmup`` to be selected too.
        min_epochs: number of first selectable epochs that are not selected. The last epoch can always be selected.
    """

    max_epochs: int
    patience: int
    warmup: int = 0
    select_warmup: bool = False
    min_epochs: int = 0

    @classmethod
    def of(cls, network: Network, warmup: int = 0, *, select_warmup: bool = False) -> "EpochLimits":
        """The limits of a network's section of the configuration."""
        return cls(network.max_epochs, network.patience, warmup, select_warmup, network.min_epochs)

    @property
    def last(self) -> int:
        """The last epoch, counted from 0 as all of these."""
        return self.warmup + self.max_epochs - 1

    @property
    def first(self) -> int:
        """The first epoch that may be selected."""
        return min(self.min_epochs if self.select_warmup else self.warmup + self.min_epochs, self.last)


@dataclass
class Selection:
    """Result so far, and the weights of the best epoch."""

    limits: EpochLimits
    result: Result = field(default_factory=Result)
    state: dict[str, Tensor] = field(default_factory=dict)

    def see(self, epoch: int, accuracies: Accuracies, model: nn.Module) -> None:
        """Record an epoch; among equal validation accuracies the later epoch wins, as in the released code."""
        result = self.result
        result.epochs = epoch + 1
        result.test_max = max(result.test_max, accuracies.test)
        if epoch >= self.limits.first and accuracies.val >= result.val_accuracy:
            result.val_accuracy, result.test_accuracy = accuracies.val, accuracies.test
            result.best_epoch = epoch
            self.state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def correct(self, accuracies: Accuracies) -> None:
        """Replace the accuracies of the best epoch by those of its float32 model, after a mixed-precision training."""
        result = self.result
        result.val_accuracy, result.test_accuracy = accuracies.val, accuracies.test
        result.test_max = max(result.test_max, accuracies.test)

    @property
    def is_over(self) -> bool:
        """Whether the last epoch was recorded, or ``patience`` epochs have passed since the best one.

        If the best epoch is in the warmup, they are counted from the end of the warmup.
        """
        return self.least_left == 0

    @property
    def least_left(self) -> int:
        """Number of epochs that follow at least, even if the validation accuracy does not improve any more."""
        limits = self.limits
        patient_until = max(limits.first, max(self.result.best_epoch, limits.warmup - 1) + limits.patience)
        return max(0, min(limits.last, patient_until) - (self.result.epochs - 1))

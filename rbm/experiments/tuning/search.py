"""A search: its space, the score of a trial, and its result."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data

from rbm.config import Config
from rbm.datasets.load import graph_checksum, graph_settings
from rbm.distillation.distill import distill
from rbm.distillation.registry import METHODS, learns_soft_labels
from rbm.experiments.runner import remembered_dataset
from rbm.experiments.tuning.space import Space, build_space, value_of, with_values


@dataclass(frozen=True)
class Search:
    """The definition of a search.

    Attributes:
        start: the configuration of the first trial, without the test set (``evaluate_on: validation``).
        method: the method to tune, a name in ``rbm.distillation.registry.METHODS``.
        seeds: seeds of splits, initialisation and dropout; a trial's accuracy is the mean over them.
        lines: the space, see :mod:`rbm.experiments.tuning.space`.
    """

    start: Config
    method: str
    seeds: tuple[int, ...]
    lines: dict[str, Any]

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}, expected one of {', '.join(METHODS)}")
        if not self.seeds:
            raise ValueError("seeds is empty, expected at least one")
        object.__setattr__(self, "start", self.start.updated({"evaluate_on": "validation"}))
        self.space()

    def space(self) -> Space:
        """Optuna's distributions, by setting."""
        return build_space(self.lines, self.start, self.method)

    def starting_values(self) -> dict[str, Any]:
        return {name: value_of(self.start, name) for name in self.lines}

    def data(self, seed: int, device: str) -> Data:
        """The graph with the split of a seed; raises as :func:`rbm.load_dataset`."""
        return remembered_dataset(graph_settings(replace(self.start, seed=seed)), device)

    def attempt(self, values: dict[str, Any], seed: int, cache: Path | None, device: str) -> tuple[float, str]:
        """:meth:`accuracy`, and no reason; or 0 and the reason, so that the search continues and avoids such values.

        A trial fails if its values contradict each other (``top_k`` above the number of experts) or do not fit the
        graph, if the loss does not stay finite, or if memory runs out. The starting point fails only by its loss.

        Raises:
            ValueError, MemoryError: the starting point cannot be trained, so hardly any trial could.
        """
        self.data(seed, device)  # errors of the graph are not those of the values
        try:
            return self.accuracy(values, seed, cache, device), ""
        except (ValueError, FloatingPointError, MemoryError, torch.OutOfMemoryError) as error:
            if values == self.starting_values() and not isinstance(error, FloatingPointError):
                raise
            return 0.0, str(error) or type(error).__name__

    def accuracy(self, values: dict[str, Any], seed: int, cache: Path | None, device: str) -> float:
        """Train a student with these values, and return its accuracy on the held-out half of the validation nodes.

        The other half selects the epoch. Raises as :func:`rbm.distill` and :meth:`rbm.config.Config.updated`.
        """
        config = replace(with_values(self.start, values), seed=seed)
        result = distill(
            self.data(seed, device),
            config=config,
            methods=[self.method],
            labels_alone=self._needs_labels(config),
            cache=cache,
            measure_latency=False,
            console=None,
        )
        return result.summary[self.method]["test_accuracy"]  # on the validation nodes that replace the test set

    def _needs_labels(self, config: Config) -> bool:
        """Whether the student may learn from an MLP on labels, as it does in ``rbm distill`` with these settings."""
        return config.distill.source == "auto" and config.teacher.name != "logits" and learns_soft_labels(self.method)

    def description(self) -> dict[str, Any]:
        """The settings that define a search, as stored in its folder."""
        config = {name: value for name, value in asdict(self.start).items() if name not in ("seed", "root")}
        found = {"method": self.method, "seeds": list(self.seeds), "space": self.lines, "config": config}
        return found | ({"graph": graph} if (graph := graph_checksum(self.start.dataset)) else {})


@dataclass(frozen=True)
class Tuned:
    """Result of a search. Accuracies are means over seeds, in [0, 1].

    Attributes:
        config: the best settings, ready for :func:`rbm.distill`, with the test set restored.
        values, accuracy: values and accuracy of the best trial; the first among equals.
        start_values, start_accuracy: values and accuracy of the first trial.
        rows: one dictionary per trial, as in ``trials.csv``.
    """

    config: Config
    values: dict[str, Any]
    accuracy: float
    start_values: dict[str, Any]
    start_accuracy: float
    rows: list[dict[str, Any]]

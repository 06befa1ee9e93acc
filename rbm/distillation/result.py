"""The result of :func:`rbm.distill`."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rbm.config import Config
from rbm.datasets.encodings import Encodings
from rbm.datasets.registry import graph_name
from rbm.datasets.splits import GraphSplit
from rbm.distillation.sentences import verdict_sentences
from rbm.distillation.summary import results_html, results_text
from rbm.distillation.trainer import student_inputs
from rbm.nn.sparse_rows import Rows
from rbm.utils.timings import Timings


@dataclass(repr=False)
class Distillation:
    """The result of :func:`rbm.distill`. ``print`` and notebooks show it as the table of results and the verdict.

    Attributes:
        students: method -> its student at the best validation epoch, in eval mode.
        method: the method whose student is kept for predictions.
        teacher: the teacher's module, or None if only its logits were given.
        teacher_logits: ``[N, C]`` on the full graph.
        split: which nodes were seen in training and which were not.
        encodings: method -> the encodings that its student takes in addition to the features, or None.
        summary: accuracies, parameter counts and, under ``"verdict"``, the result of
            :func:`rbm.distillation.verdict.judge`; as in ``summary.json``.
        timings: seconds of each phase in this process, and milliseconds to predict one node and all nodes, as in
            ``timings.json``.
        config: the configuration of the run.
        trials: the trials of the search that chose the configuration, one dictionary each, as in ``auto.csv``; None
            without a search.
    """

    students: dict[str, nn.Module]
    method: str
    teacher: nn.Module | None
    teacher_logits: Tensor
    split: GraphSplit
    encodings: dict[str, Encodings | None]
    summary: dict[str, Any]
    timings: Timings
    config: Config
    trials: list[dict[str, Any]] | None = None

    @property
    def student(self) -> nn.Module:
        """The student that is kept for predictions."""
        return self.students[self.method]

    @property
    def verdict(self) -> list[str]:
        """The verdict on the run, as a list of sentences."""
        return verdict_sentences(self.summary["verdict"])

    def student_inputs(self, method: str | None = None) -> Rows:
        """Rows of all nodes of the full graph for the student of a method, by default :attr:`student`: features, then
        the encodings that the student takes.
        """
        return student_inputs(self.split, self.encodings[method or self.method])[1]

    def __repr__(self) -> str:
        about = f"{graph_name(self.summary['dataset'])}, {self.summary['setting']}, students {', '.join(self.students)}"
        return f"Distillation({about}, keeps {self.method})"

    def __str__(self) -> str:
        return results_text(self.summary, self.timings)

    def _repr_html_(self) -> str:
        return results_html(self.summary, self.timings)

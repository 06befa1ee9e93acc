"""The result of :func:`rbm.distill`."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rbm.config import Config
from rbm.datasets.encodings import Encodings
from rbm.datasets.registry import short_name
from rbm.datasets.splits import GraphSplit
from rbm.distillation.sentences import verdict_sentences
from rbm.distillation.summary import results_html, results_text
from rbm.distillation.trainer import student_inputs
from rbm.nn.sparse_rows import Rows
from rbm.utils.timings import Timings


@dataclass(repr=False)
class Distillation:
    """What :func:`rbm.distill` returns. Printed, it is the table of results and the verdict; in a notebook too.

    Attributes:
        students: method -> its student at its best validation epoch, in eval mode.
        method: the method whose student is kept for predictions.
        teacher: the teacher's module, or None where only its logits were given.
        teacher_logits: ``[N, C]`` on the full graph.
        split: which nodes training saw, and which it did not.
        encodings: method -> what its student sees beside the features, or None.
        summary: accuracies, parameter counts and, under ``"verdict"``, what :func:`rbm.distillation.verdict.judge`
            returns; as in ``summary.json``.
        timings: seconds of each phase in this process, and milliseconds for one node and for all, as in
            ``timings.json``.
        config: the configuration that made it.
        trials: of the search that chose the configuration, a dictionary each, as in ``auto.csv``; None without one.
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
        """The verdict on the run, in sentences."""
        return verdict_sentences(self.summary["verdict"])

    def student_inputs(self, method: str | None = None) -> Rows:
        """The rows that a method's student takes for all nodes of the full graph: features, and beside them encodings.
        By default those of :attr:`student`.
        """
        return student_inputs(self.split, self.encodings[method or self.method])[1]

    def __repr__(self) -> str:
        about = f"{short_name(self.summary['dataset'])}, {self.summary['setting']}, students {', '.join(self.students)}"
        return f"Distillation({about}, keeps {self.method})"

    def __str__(self) -> str:
        return results_text(self.summary, self.timings)

    def _repr_html_(self) -> str:
        return results_html(self.summary, self.timings)

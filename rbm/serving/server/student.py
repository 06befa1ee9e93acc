"""The served student: the format of its rows, and whether another student can replace it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rbm.nn.int8 import check_kind, quantized
from rbm.nn.parameters import dtype_of
from rbm.nn.pretrained import HubMixin
from rbm.nn.saved_student import STUDENT, read_description
from rbm.serving.prediction import load_passed_on, predict_probabilities
from rbm.training.run_folder import load, load_encodings
from rbm.utils.files import as_path


@dataclass(frozen=True, eq=False)
class ServedStudent:
    """A student that has been tested with one forward.

    Attributes:
        name: the name of its run folder, or of its class.
        method: its method in the run folder, or None.
        module: maps rows ``[B, in_channels]`` to logits ``[B, num_classes]``, in eval mode on the CPU.
        num_classes: C.
        encodings: encodings of the training graph's nodes, ``[N, D]``, or None.
        passed_on: what these nodes pass on to a new neighbour, which gets the mean, ``[N, D]``, or None.
    """

    name: str
    method: str | None
    module: nn.Module
    num_classes: int
    encodings: Tensor | None
    passed_on: Tensor | None = None

    @property
    def in_channels(self) -> int:
        """Numbers per row: features, and encodings if the student takes them."""
        return self.module.in_channels

    @property
    def features(self) -> int:
        """Numbers per row without encodings."""
        return self.in_channels - (0 if self.encodings is None else self.encodings.shape[1])

    @property
    def beside(self) -> str:
        """What follows the features of a row: encodings, or the stored means of a student of hops."""
        described = getattr(self.module, "beside", HubMixin.beside)
        return "encodings" if described == HubMixin.beside else described

    @property
    def meaning(self) -> str:
        """A description of the content of a row of ``x``."""
        if self.encodings is None:
            return f"{self.in_channels} features"
        nodes, width = self.encodings.shape
        return (
            f"{self.features} features and {width} {self.beside}; or the {self.features} features alone with"
            f" 'neighbors', for each row the list of the training graph's nodes (0 to {nodes - 1}) that it is joined to"
        )

    def probabilities(self, rows: Tensor) -> Tensor:
        """Float32 ``[B, C]`` of rows ``[B, in_channels]``."""
        return predict_probabilities(self.module, rows.to(dtype_of(self.module))).float()

    def info(self) -> dict[str, Any]:
        """The information for ``GET /info``."""
        return {
            "name": self.name,
            "method": self.method,
            "student": type(self.module).__name__,
            "in_channels": self.in_channels,
            "features": self.features,
            "encodings": self.in_channels - self.features,
            "num_classes": self.num_classes,
            "rows": self.meaning,
        }

    def check_successor(self, other: "ServedStudent") -> None:
        """Raise ValueError unless clients can send the same rows to ``other``."""
        own, others = ((s.features, s.in_channels - s.features) for s in (self, other))
        if own != others:
            raise ValueError(
                f"the new student of {other.name} takes {others[0]} features and {others[1]} {other.beside}, expected"
                f" {own[0]} and {own[1]}, as the one that is served; start another server for it"
            )


def open_student(
    source: nn.Module | Path | str, method: str | None = None, quantize: str | None = None
) -> ServedStudent:
    """Load a student from its run folder, or take it as given, and run it once so that the first client does not wait.

    Args:
        source: a run folder, a folder written by ``save_pretrained``, or a student.
        method: the method of the student in a run folder; by default the student that the run keeps.
        quantize: ``int8`` for 8-bit weights, as in :func:`rbm.load`.

    Raises:
        FileNotFoundError: no finished run.
        ValueError: a corrupt file, encodings that do not match the student's width, an output that is not finite, a
            method without a student in the run folder, or a student that ``quantize`` does not support.
    """
    check_kind(quantize)
    if isinstance(source, nn.Module):
        if method is not None:
            raise ValueError(f"method is {method!r}, but the student was given as an object; leave it out")
        module = source.eval() if quantize is None else quantized(source, quantize)
        name, encodings, passed_on = type(source).__name__, None, None
    else:
        module, encodings = load(source, method, quantize=quantize, quiet=True), load_encodings(source, method)
        passed_on = load_passed_on(source, method, module, encodings)
        folder = as_path("run", source)
        name, described = folder.resolve().name, folder / STUDENT
        method = read_description(described, method)["method"] if described.is_file() else None
    if encodings is not None and not encodings.shape[1] < module.in_channels:
        raise ValueError(
            f"run {source}: its encodings have {encodings.shape[1]} columns, expected fewer than the student's"
            f" {module.in_channels} inputs; its files do not belong together"
        )
    served = ServedStudent(name, method, module, 0, encodings)
    answer = served.probabilities(torch.zeros(1, module.in_channels))
    if not answer.isfinite().all():
        raise ValueError(f"student {name}: a row of zeros gets probabilities that are not finite; train it anew")
    return ServedStudent(name, method, module, answer.shape[1], encodings, passed_on)

"""What a method is given to make a student, and what it hands back."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rbm.checkpoint import RunFolder
from rbm.config import Config, EncodingConfig, Network
from rbm.distributed import from_first
from rbm.encodings import Encodings
from rbm.progress import Progress
from rbm.splits import GraphSplit
from rbm.teaching import Teaching
from rbm.training import Learner, fit


class Learned(NamedTuple):
    """A trained student.

    Attributes:
        student: at its best validation epoch, in eval mode.
        arguments: those of its class that rebuild it.
        result: accuracies and epochs, as in ``summary.json``.
        encodings: columns that it takes beside the features, or None.
    """

    student: nn.Module
    arguments: dict[str, Any]
    result: dict[str, Any]
    encodings: Encodings | None


@dataclass
class Lesson:
    """One graph, one split and one teacher, which all methods of a run share.

    Attributes:
        split: the graph, and what training may see of it.
        teaching: the teacher's answers.
        config: the whole configuration.
        classes: C.
        encode: the columns that a section ``encoding`` asks for (None for none), computed once each.
        folder: where phases are kept and taken up again, or None.
        progress: where they are shown.
    """

    split: GraphSplit
    teaching: Teaching
    config: Config
    classes: int
    encode: Callable[[EncodingConfig], Encodings | None]
    folder: RunFolder | None
    progress: Progress

    def width(self, encodings: Encodings | None = None) -> int:
        """Columns of a student's input."""
        return self.split.graph.num_features + (0 if encodings is None else encodings.full.shape[1])

    def hidden(self, network: Network) -> int:
        """Hidden width of a student, inflated where the run asks for it."""
        return network.hidden_channels * self.config.inflate

    def start(self, student: type[nn.Module], arguments: dict[str, Any], *, member: int = 0) -> nn.Module:
        """A new student on the graph's device. Each starts from the seed, so that none depends on what ran before."""
        self.seed(member)
        return student(**arguments).to(self.split.graph.x.device)

    def seed(self, part: int = 0) -> None:
        """Let what is drawn from here on depend on the run's seed and on a part's number alone."""
        torch.manual_seed(self.config.seed + 1_000_003 * part)

    def fit(self, phase: str, learner: Learner, network: Network, *, warmup: int = 0) -> dict[str, Any]:
        """Train a phase to its best validation epoch: see :func:`fit_phase`."""
        return fit_phase(phase, learner, network, self.folder, self.progress, warmup=warmup)


def fit_phase(
    phase: str,
    learner: Learner,
    network: Network,
    folder: RunFolder | None,
    progress: Progress,
    *,
    warmup: int = 0,
) -> dict[str, Any]:
    """Train by :func:`rbm.training.fit`, or take a phase from the run folder where it is finished; its result."""
    if (finished := from_first(lambda: _finished(phase, learner.model, folder, progress))) is not None:
        result, state = finished
        learner.model.load_state_dict(state)
        learner.resume_at(warmup + 1)
        learner.model.eval()
        return result
    result = asdict(
        fit(
            phase,
            learner,
            max_epochs=network.max_epochs,
            patience=network.patience,
            warmup=warmup,
            min_epochs=network.min_epochs,
            folder=folder,
            progress=progress,
        )
    )
    if folder is not None:
        folder.save_phase(phase, learner.model, result)
    return result


def _finished(
    phase: str, model: nn.Module, folder: RunFolder | None, progress: Progress
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Result and state of a phase that the run folder holds, or None."""
    result = None if folder is None else folder.finished(phase)
    if result is None:
        return None
    folder.load_phase(phase, model)
    progress.say(f"{phase}: finished before, taken from {folder.path}")
    return result, model.state_dict()

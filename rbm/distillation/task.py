"""Input and result of a distillation method."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rbm.config import Config, EncodingConfig, Network
from rbm.datasets.encodings import Encodings, encode
from rbm.datasets.splits import GraphSplit
from rbm.nn.pretrained import HubMixin
from rbm.teachers.outputs import TeacherOutputs
from rbm.training.loop import Trainer, fit_phase
from rbm.training.run_folder import RunFolder
from rbm.utils.cache import Cache
from rbm.utils.distributed import once
from rbm.utils.progress import Progress
from rbm.utils.timings import Timings


class TrainedStudent(NamedTuple):
    """A trained student.

    Attributes:
        student: at its best validation epoch, in eval mode.
        result: accuracies and epochs, as in ``summary.json``.
        encodings: columns that it takes beside the features, or None.
    """

    student: HubMixin
    result: dict[str, Any]
    encodings: Encodings | None


@dataclass
class Encoder:
    """The columns that sections ``encoding`` ask for. Methods that ask for the same share them.

    Attributes:
        split: the graph, and what training may see of it.
        classes: C.
        seed: of the run.
        cache: has encodings that another run computed.
        extra: further columns, ``[N, D]`` each.
        progress: shows that they are computed.
        timings: gets the time.
    """

    split: GraphSplit
    classes: int
    seed: int
    cache: Cache
    extra: list[Tensor]
    progress: Progress
    timings: Timings
    _known: dict[Any, Encodings | None] = field(default_factory=dict)

    def __call__(self, section: EncodingConfig) -> Encodings | None:
        """The columns of a section; None where it wants none and there are no further ones."""
        return once(self._known, section, lambda: self._compute(section))

    def _compute(self, section: EncodingConfig) -> Encodings | None:
        if not (section.deepwalk or section.label_propagation or self.extra):
            return None
        given = {"seed": self.seed, "cache": self.cache, "extra": self.extra}
        with self.timings.measured("encodings"):
            if not section.deepwalk:
                with self.progress.step("encodings"):
                    return encode(self.split, section, self.classes, **given)
            # Minutes on a large graph. Where the cache has them, or a node has no edge, the bar is filled at the end.
            walks = section.epochs * section.walks_per_node * self.split.observed.num_nodes
            with self.progress.count("encodings", walks) as advance:
                left = walks

                def read(more: int) -> None:
                    nonlocal left
                    left -= more
                    advance(more)

                found = encode(self.split, section, self.classes, **given, advance=read)
                advance(left)
            return found


@dataclass
class DistillationTask:
    """One graph, one split and one teacher, which all methods of a run share.

    Attributes:
        split: the graph, and what training may see of it.
        teacher_outputs: the teacher's answers.
        config: the whole configuration.
        classes: C.
        encode: the columns that a section ``encoding`` asks for (None for none), computed once each.
        folder: where phases are kept and taken up again, or None.
        progress: where they are shown.
        cache: has models that another run trained.
    """

    split: GraphSplit
    teacher_outputs: TeacherOutputs
    config: Config
    classes: int
    encode: Callable[[EncodingConfig], Encodings | None]
    folder: RunFolder | None
    progress: Progress
    cache: Cache = field(default_factory=Cache)

    def width(self, encodings: Encodings | None = None) -> int:
        """Columns of a student's input."""
        return self.split.graph.num_features + (0 if encodings is None else encodings.full.shape[1])

    def hidden(self, network: Network) -> int:
        """Hidden width of a student, inflated where the run asks for it."""
        return network.hidden_channels * self.config.inflate

    def new_student(
        self,
        kind: type[HubMixin],
        section: Network,
        encodings: Encodings | None = None,
        *,
        member: int = 0,
        **further: Any,
    ) -> nn.Module:
        """A new student of a class, with the settings of a section and the sizes of this graph, on its device.

        Each starts from the seed and the number of the ``member``, so that none depends on what ran before. ``further``
        arguments come on top of those that the section gives.
        """
        self.seed(member)
        sizes = {
            "in_channels": self.width(encodings),
            "hidden_channels": self.hidden(section),
            "out_channels": self.classes,
        }
        return kind.from_config(section, **sizes | further).to(self.split.graph.x.device)

    def seed(self, part: int = 0) -> None:
        """Let what is drawn from here on depend on the run's seed and on a part's number alone."""
        torch.manual_seed(self.config.seed + 1_000_003 * part)

    def fit(
        self, phase: str, trainer: Trainer, network: Network, *, warmup: int = 0, select_warmup: bool = False
    ) -> dict[str, Any]:
        """Train a phase to its best validation epoch: see :func:`fit_phase`."""
        options = {"warmup": warmup, "select_warmup": select_warmup}
        return fit_phase(phase, trainer, network, self.folder, self.progress, **options)

    # Former names, kept for one version.

    @property
    def teaching(self) -> TeacherOutputs:
        """The former name of :attr:`teacher_outputs`, kept for one version."""
        return self.teacher_outputs

    def start(self, student: type[nn.Module], arguments: dict[str, Any], *, member: int = 0) -> nn.Module:
        """The former way to a :meth:`new_student`, from all its arguments."""
        self.seed(member)
        return student(**arguments).to(self.split.graph.x.device)

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
from rbm.training.time_limit import current_limit
from rbm.utils.cache import Cache
from rbm.utils.distributed import compute_once
from rbm.utils.progress import Progress
from rbm.utils.timings import Timings


class TrainedStudent(NamedTuple):
    """A trained student.

    Attributes:
        student: the student at its best validation epoch, in eval mode.
        result: accuracies and epochs, as in ``summary.json``.
        encodings: columns that the student takes in addition to the features, or None.
    """

    student: HubMixin
    result: dict[str, Any]
    encodings: Encodings | None


def columns_of(encodings: Encodings | None) -> int:
    """Number of columns that encodings add to a student's rows."""
    return 0 if encodings is None else encodings.full.shape[1]


def check_student(kind: type) -> None:
    """Raise TypeError unless modules of class ``kind`` can be saved and loaded as students."""
    if not issubclass(kind, HubMixin):
        raise TypeError(
            f"student is a {kind.__name__}, expected a subclass of HubMixin, which a run folder can store; declare it"
            f" as class {kind.__name__}(HubMixin, nn.Module) with from rbm.nn.pretrained import HubMixin"
        )


@dataclass
class Encoder:
    """Computes the encodings of ``encoding`` sections. Methods with equal sections share the result.

    Attributes:
        split: the graph, and which nodes training may see.
        classes: number of classes.
        seed: of the run.
        cache: where encodings are kept for other runs.
        extra: further columns, ``[N, D]`` each.
        progress: shows the computation.
        timings: records its time.
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
        """The encodings of a section; None if it has none and there are no ``extra`` columns."""
        return compute_once(self._known, section, lambda: self._compute(section))

    def _compute(self, section: EncodingConfig) -> Encodings | None:
        if not (section.deepwalk or section.label_propagation or self.extra):
            return None
        given = {"seed": self.seed, "cache": self.cache, "extra": self.extra}
        with self.timings.measured("encodings"):
            if not section.deepwalk:
                with self.progress.step("encodings"):
                    return encode(self.split, section, self.classes, **given)
            # DeepWalk takes minutes on a large graph. If encodings are cached or a node has no edge, fewer walks are
            # read, and the bar is filled at the end.
            walks = section.epochs * section.walks_per_node * self.split.observed.num_nodes
            with self.progress.count("encodings", walks) as advance:
                left, limit, began = walks, current_limit(), 0.0
                # A run after a search takes these encodings from the cache, unless its graph has further nodes.
                reused = self.cache.folder is not None and self.split.setting == "transductive"

                def read(more: int) -> None:
                    nonlocal left, began
                    # The first call also waited for gensim's import and for the walks.
                    began, rest = began or limit.passed(), walks - left
                    left -= more
                    advance(more)
                    passed = limit.passed() - began
                    limit.check("encodings", passed * left / rest if rest else 0.0, reused=reused)

                found = encode(self.split, section, self.classes, **given, advance=read)
                advance(left)
            return found


@dataclass
class DistillationTask:
    """The graph, split, teacher and configuration that all methods of a run share.

    Attributes:
        split: the graph, and which nodes training may see.
        teacher_outputs: the outputs of the teacher.
        config: the whole configuration.
        classes: number of classes.
        encode: maps an ``encoding`` section to its encodings or None, computed once for equal sections.
        folder: run folder that stores the phases, from which they resume; or None.
        progress: shows the phases.
        cache: models that were trained by other runs.
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
        """Number of columns of a student's input."""
        return self.split.graph.num_features + columns_of(encodings)

    def hidden(self, network: Network) -> int:
        """Hidden width of a student, multiplied by ``config.inflate``."""
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
        """A new student of class ``kind``, with the settings of a section and the sizes and device of this graph.

        The random state is set from the seed of the run and the ``member`` number, so that a student does not depend on
        what ran before. ``further`` arguments extend or override those of the section.

        Raises:
            TypeError: ``kind`` is no student, so that a run folder could not store it.
        """
        check_student(kind)
        self.seed(member)
        sizes = {
            "in_channels": self.width(encodings),
            "hidden_channels": self.hidden(section),
            "out_channels": self.classes,
        }
        return kind.from_config(section, **sizes | further).to(self.split.graph.x.device)

    def seed(self, part: int = 0) -> None:
        """Seed the random state from the seed of the run and the number of a part."""
        torch.manual_seed(self.config.seed + 1_000_003 * part)

    def fit(
        self, phase: str, trainer: Trainer, network: Network, *, warmup: int = 0, select_warmup: bool = False
    ) -> dict[str, Any]:
        """Train a phase, in the precision of the run, and restore its best validation epoch: see :func:`fit_phase`."""
        if trainer.follows_precision:
            trainer.precision = self.config.precision
        options = {"warmup": warmup, "select_warmup": select_warmup}
        return fit_phase(phase, trainer, network, self.folder, self.progress, **options)

    # Former names, kept for one version.

    @property
    def teaching(self) -> TeacherOutputs:
        """The former name of :attr:`teacher_outputs`, kept for one version."""
        return self.teacher_outputs

    def start(self, student: type[nn.Module], arguments: dict[str, Any], *, member: int = 0) -> nn.Module:
        """The former version of :meth:`new_student`, with all arguments in a dictionary; kept for one version."""
        self.seed(member)
        return student(**arguments).to(self.split.graph.x.device)

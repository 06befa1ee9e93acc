"""The data of a finished run for a report."""

from pathlib import Path

from rbm.config import Config
from rbm.datasets.registry import graph_name
from rbm.distillation.report import OBSERVED
from rbm.distillation.report.charts import interval, styles_of
from rbm.distillation.result_files import check_kind, read_results
from rbm.training.run_folder import read_metrics

FORMAT = 1  # of report.json
TEACHER = "teacher"
SIZES = ("nodes", "edges", "features", "classes")  # of the graph, in summary.json
_CURVES = ("loss", "val_accuracy", "test_accuracy")


class RunData:
    """The contents of a run folder that a report uses.

    Args:
        folder: run folder with a ``report.json``.
        key: prefix for the names of pictures and sections, since a page may show several runs.

    Attributes:
        accuracy: model -> test accuracy and its 95 % interval, in per cent.

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged, or of another version.
    """

    def __init__(self, folder: Path, key: str = "run") -> None:
        self.folder, self.key = Path(folder), key
        self.figures = read_results(self.folder / OBSERVED)
        if (found := self.figures.get("format")) != FORMAT:
            raise ValueError(
                f"{self.folder / OBSERVED} has format {found}, expected {FORMAT}: another version wrote it, or it is"
                " damaged; remove it, and rbm report writes it anew"
            )
        self.summary, self.timings = (read_results(self.folder / f"{name}.json") for name in ("summary", "timings"))
        check_kind(self.figures, ("models",), dict, "values by name")
        check_kind(self.figures, ("of",), int, "a number of nodes")
        check_kind(self.summary, ("verdict",), dict, "values by name")
        check_kind(self.summary, SIZES, int, "a whole number")
        check_kind(self.timings, self.timings, dict, "values by name")
        kept = self.summary["verdict"]["kept"]
        if self.figures["kept"] != kept or not self.figures["models"].keys() <= self.summary.keys():
            raise ValueError(
                f"{self.folder / OBSERVED} is of {self.figures['kept']} and others, and summary.json of {kept}: the run"
                " was resumed with other students since; remove it, and rbm report writes it anew"
            )
        self.config = Config.from_yaml(self.folder / "config.yaml")
        self.records = read_metrics(self.folder)
        for number, record in enumerate(self.records, 1):
            if absent := [name for name in _CURVES if not isinstance(record.get(name), float | int)]:
                raise ValueError(
                    f"{self.folder / 'metrics.jsonl'}: line {number} has no number as {', '.join(absent)}, expected an"
                    " epoch as a run writes it; remove the line"
                )
        measured = self.folder / "latency.json"
        self.latency = read_results(measured) if measured.is_file() else None
        self.kept, self.nodes = self.figures["kept"], self.figures["of"]
        self.models = [name for name in self.summary if name in (*self.figures["models"], TEACHER)]
        check_kind(self.summary, self.models, dict, "values by name")
        self.styles = styles_of(self.models, self.kept)
        self.accuracy = {}
        for name in self.models:
            check_kind(self.summary[name], ("test_accuracy",), float | int, "a number")
            middle = self.summary[name]["test_accuracy"]
            self.accuracy[name] = (100 * middle, *interval(round(middle * self.nodes), self.nodes))

    @property
    def name(self) -> str:
        """The names of the graph and of the setting."""
        return f"{graph_name(self.summary['dataset'])}, {self.summary['setting']}"

    @property
    def where(self) -> str:
        """The kind of nodes that test accuracy is measured on."""
        return "unseen test nodes" if self.figures["unseen"] else "test nodes"

    @property
    def shown(self) -> list[str]:
        """Models in charts with little room: the teacher, the kept student and the best two others at most."""
        others = sorted(
            (m for m in self.figures["models"] if m not in (TEACHER, self.kept)), key=lambda m: -self.accuracy[m][0]
        )
        return [name for name in (TEACHER, self.kept, *others[:2]) if name in self.figures["models"]]

    @property
    def pair(self) -> list[str]:
        """The teacher, if its predictions are known, and the kept student."""
        return [name for name in (TEACHER, self.kept) if name in self.figures["models"]]

    def milliseconds(self, model: str) -> float | None:
        """Milliseconds of a model for one node; None if it was not timed."""
        return self.timings.get(model, {}).get("one_node_ms")

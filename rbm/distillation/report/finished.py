"""Reads a finished run from its folder, to write a report for a run that has none."""

from pathlib import Path

from rbm.config import Config
from rbm.datasets.encodings import Encodings
from rbm.distillation.result import Distillation
from rbm.distillation.result_files import read_results
from rbm.distillation.run_graph import split_of_run, teacher_of_run
from rbm.nn.saved_student import STUDENT, find_student, read_description
from rbm.teachers.outputs import outputs_from_module
from rbm.training.run_folder import load, load_encodings
from rbm.utils.files import as_path, read_json
from rbm.utils.precision import fast_float32
from rbm.utils.repeatable import deterministic


def read_distillation(folder: Path | str, root: Path | str | None = None) -> Distillation:
    """The result that :func:`rbm.distill` returned for a run folder.

    Args:
        folder: folder of a finished run.
        root: folder of the dataset's raw files; by default that of the run.

    Returns:
        The result. Its ``teacher_logits`` are None if the teacher was given and the graph contains no logits.

    Raises:
        FileNotFoundError: the run is not finished, or its graph does not exist.
        ValueError: a file is damaged, or the graph is not that of the run.
    """
    folder = as_path("folder", folder)
    find_student(folder)  # raises an error if there is none
    config, summary = Config.from_yaml(folder / "config.yaml"), read_results(folder / "summary.json")
    split, classes = split_of_run(folder, config, root)
    teacher = teacher_of_run(folder, config, split, classes)
    logits = split.graph.get("teacher_logits")
    if teacher is not None:
        with deterministic(), fast_float32(split.graph.x.device):  # bitwise the same as in the run
            logits = outputs_from_module(teacher, split, classes, summary["teacher"]).logits
    methods = [name for name in summary if (folder / f"{name}.safetensors").is_file() and name in _described(folder)]
    encodings: dict[str, Encodings | None] = {}
    for method in methods:
        full = load_encodings(folder, method)
        encodings[method] = None if full is None else Encodings(split.of_observed(full), full)
    return Distillation(
        students={method: load(folder, method, quiet=True) for method in methods},
        method=read_description(folder / STUDENT)["method"],
        teacher=teacher,
        teacher_logits=logits,
        split=split,
        encodings=encodings,
        summary=summary,
        timings=read_results(folder / "timings.json"),
        config=config,
    )


def _described(folder: Path) -> set[str]:
    content = read_json(folder / STUDENT)
    return {content["method"], *content.get("students", {})}

"""Run folders for tests that use finished runs: one with an untrained student, and what earlier versions wrote."""

import json
from pathlib import Path

from torch import Tensor

import rbm
from rbm.config import Config
from rbm.training.run_folder import RunFolder, SavedStudent, save_students


def save_run(folder: Path, features: int, *, encodings: Tensor | None = None) -> Path:
    """A student of three classes, on rows of ``features`` and of ``encodings [N, D]``; the folder."""
    width = features + (0 if encodings is None else encodings.shape[1])
    run, student = RunFolder(folder, Config()), rbm.RbMStudent(width, 8, 3)
    run.save_phase("rbm", student, {})
    if encodings is not None:
        run.save_tensors("encodings", {"encodings": encodings})
    save_students(folder, "rbm", {"rbm": SavedStudent(student, None if encodings is None else "encodings")})
    return folder


def forget_files(folder: Path) -> None:
    """Leave the files' checksums out of ``student.json``, as earlier versions did."""
    described = json.loads((folder / "student.json").read_text())
    del described["files"]
    (folder / "student.json").write_text(json.dumps(described))

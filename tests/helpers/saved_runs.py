"""A run folder with an untrained student, for tests that use finished runs."""

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

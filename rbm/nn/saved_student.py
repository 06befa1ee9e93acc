"""Saved students: their description in a file (class and arguments), checks of it, and loading of the weights.

``config.json`` and ``model.safetensors`` describe one student, as on the Hugging Face Hub (:mod:`rbm.nn.pretrained`);
the ``student.json`` of a run folder describes all students of the run.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rbm.utils.files import first_line, read_json
from rbm.utils.plugins import is_of_package
from rbm.utils.tensor_files import check_finite, fingerprint, read_sealed, stored_checksum

CONFIG, WEIGHTS = "config.json", "model.safetensors"
STUDENT = "student.json"  # in a run folder, instead of config.json
ENCODED = "encoding_columns"  # key in both files: HubMixin.encodings, if it is not 0
# Classes of saved students by name. ``import rbm`` registers those of this package; a plugin registers its own.
STUDENTS: dict[str, type[nn.Module]] = {}


def describe(student: nn.Module, **further: Any) -> dict[str, Any]:
    """The description that :func:`rebuild` reads: class, arguments, their checksum, and the version that wrote it.
    ``further`` keys are added for other readers.
    """
    from rbm_kernels import __version__

    name, arguments = type(student).__name__, student.arguments
    checksum = _checksum(name, arguments)
    if student.encodings:
        further = {**further, ENCODED: student.encodings}
    return {**further, "class": name, "arguments": arguments, "checksum": checksum, "rbm_version": __version__}


def _checksum(name: str, arguments: dict[str, Any]) -> str:
    return fingerprint("student", [name, arguments])


def check_exists(folder: Path) -> None:
    """Raise FileNotFoundError unless the folder of a run or of a saved student exists."""
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise FileNotFoundError(f"{folder} {found}; expected the run folder of a finished rbm distill")


def find_student(folder: Path, method: str | None = None) -> tuple[Path, Path]:
    """The files of a saved student: its description and its weights.

    A run folder describes its students in ``student.json``, by method; any other folder has ``config.json`` and
    ``model.safetensors``, as on the Hub.

    Args:
        folder: the folder with the files.
        method: the method whose student of a run folder is returned; by default the one kept for predictions.

    Raises:
        FileNotFoundError: the folder or a file is missing.
        ValueError: ``student.json`` names no method, or the folder has no student of ``method``.
    """
    check_exists(folder)
    config, weights = folder / CONFIG, folder / WEIGHTS
    if (folder / STUDENT).is_file() or not config.is_file():
        config = folder / STUDENT
        if not config.is_file():
            raise FileNotFoundError(
                f"{folder} holds no {STUDENT}: it is no run folder, or its run is not finished; and no {CONFIG}, as"
                " save_pretrained writes it"
            )
        weights = folder / f"{read_description(config, method)['method']}.safetensors"
    elif method is not None:
        raise ValueError(f"method is {method!r}, but {folder} is no run folder and holds one student; leave it out")
    if not weights.is_file():
        raise FileNotFoundError(f"{folder} holds no {weights.name}: its student was not written to the end")
    return config, weights


def check_described(config: Path, described: dict[str, Any], path: Path) -> None:
    """Raise ValueError if ``student.json`` has the checksum of another file than ``path``, whose folder it is in.

    Earlier versions wrote no checksums of files into it, and files of other programs have none.
    """
    files = described.get("files")
    expected = files.get(path.name) if isinstance(files, dict) else None
    if expected is not None and stored_checksum(path) not in (None, expected):
        raise ValueError(
            f"{path} is not the file that {config} describes (its checksum differs): the folder mixes two runs; copy"
            " all files of one run, and replace a folder that is in use by renaming another one"
        )


def read_description(config: Path, method: str | None = None) -> dict[str, Any]:
    """The description of a student in the ``student.json`` of a run folder: the keys of :func:`describe`, and
    ``method``.

    Args:
        config: the file.
        method: the method of the student; by default the one kept for predictions.

    Raises:
        ValueError: the file does not describe a student, or has none of ``method``.
    """
    try:
        content = read_json(config)
        kept, others = content["method"], content.get("students", {})
        names = [kept, *others]
        if not all(isinstance(name, str) and name == Path(name).name for name in names):
            raise ValueError(f"its method is {kept!r}")
        if method not in (None, *names):
            raise _UnknownMethodError(
                f"method is {method!r}, but {config.parent} describes the students {', '.join(names)}; name one of"
                " them, or train it"
            )
        described = content if method in (None, kept) else others[method]
        if others and "encodings" not in described:
            raise KeyError("encodings")
        return {**described, "method": method or kept}
    except _UnknownMethodError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise _undescribed(config, error) from error


class _UnknownMethodError(ValueError):
    """The run folder has no student of the method."""


@torch.inference_mode(False)  # tensors made in inference mode do not count changes, so they would not be packed
def rebuild(
    config: Path, weights: Path, kind: type[nn.Module] | None = None, *, method: str | None = None
) -> nn.Module:
    """Build a student from its description and weights, in eval mode, on the CPU, and in float32 whatever PyTorch's
    default dtype is. ``method`` selects one of the students that a run folder describes.

    Raises:
        ValueError: a file is corrupt, the files do not belong together, or the class is not ``kind``.
    """
    kind, arguments, encodings = _described(config, weights, kind, method)
    tensors, _ = read_sealed(weights, foreign=config.name != STUDENT)  # files of a run are written by this package
    try:
        # Each layer has at least one tensor. Without this check, a huge number of layers would take forever to build.
        counts = [arguments.get(name) for name in ("num_layers", "members")]
        if math.prod(count for count in counts if isinstance(count, int)) > max(1, len(tensors)):
            raise ValueError(f"they describe more layers than {weights} has tensors, {len(tensors)}")
        if is_of_package(kind):  # the class of a plugin may not support meta tensors
            with torch.device("meta"):
                _load_state(kind(**arguments), {name: tensor.to("meta") for name, tensor in tensors.items()}, weights)
        student = build(kind, arguments)
    except _UnfitError:
        raise
    except (ValueError, TypeError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise ValueError(f"{config} holds arguments that {kind.__name__} does not take: {first_line(error)}") from error
    if encodings:
        if not encodings < getattr(student, "in_channels", 0):
            raise _undescribed(config, ValueError(f"its {ENCODED} are {encodings}, and a row has fewer numbers"))
        student.encodings = encodings
    fill(student, tensors, weights)
    return student.eval()


def build(kind: type[nn.Module], arguments: dict[str, Any]) -> nn.Module:
    """A module on the CPU and in float32, whatever PyTorch's default device and dtype are."""
    with torch.device("cpu"):
        module = kind(**arguments)
    # Setting the default dtype instead would not be safe in several threads.
    return module if torch.get_default_dtype() == torch.float32 else module.float()


class _UnfitError(ValueError):
    """The weights do not fit a module."""


def fill(module: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Load the tensors of a file into a module; ValueError if they do not fit it or are not finite."""
    check_finite(path, tensors)
    _load_state(module, tensors, path)


def _load_state(module: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise _UnfitError(f"{path} does not fit {type(module).__name__}: {error}") from error


def _undescribed(config: Path, error: Exception) -> ValueError:
    reason = f"nothing is known of {error}" if isinstance(error, KeyError) else str(error)
    return ValueError(f"{config} does not describe a student of this package: {reason}")


def _described(
    config: Path, weights: Path, kind: type[nn.Module] | None, method: str | None
) -> tuple[type[nn.Module], dict[str, Any], int]:
    """Class, arguments, and the number of columns of a row that are encodings."""
    try:
        content = read_description(config, method) if config.name == STUDENT else read_json(config)
        name, arguments = content["class"], dict(content["arguments"])
        if kind is None and name not in STUDENTS:
            raise ValueError(
                f"its class {name} is not one of them; if a plugin defines the class, load that first: rbm --plugin"
                " FILE before the command, rbm.utils.plugins.load_plugin(FILE) in Python"
            )
        known, encodings = STUDENTS[name] if kind is None else kind, content.get(ENCODED, 0)
        if type(encodings) is not int or encodings < 0:
            raise ValueError(f"its {ENCODED} are {encodings!r}, expected a whole number from 0")
    except (ValueError, KeyError, TypeError) as error:
        raise _undescribed(config, error) from error
    if name != known.__name__:
        raise ValueError(f"{config} describes a {name}, expected a {known.__name__}; rbm.hub.load takes any")
    if content.get("checksum") not in (None, _checksum(name, arguments)):
        raise ValueError(
            f"{config} is damaged: its content is not what was written (its checksum differs); restore it, or remove"
            " the line of the checksum where it was changed on purpose"
        )
    check_described(config, content, weights)
    return known, arguments, encodings

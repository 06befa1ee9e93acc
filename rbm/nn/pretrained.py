"""Students on the Hugging Face Hub, or in a folder laid out as there: what every student inherits.

Such a folder holds ``config.json`` (class and arguments), ``model.safetensors``, and ``README.md``, the model card.
Loading from a folder needs nothing more than this package; the card and the Hub need ``huggingface_hub``
(``pip install 'rbm-kernels[hub]'``), which is imported when it is first asked for.
"""

import inspect
import logging
import math
import tempfile
import warnings
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rbm.utils.files import first_line, read_json, write_bytes, write_json, write_text
from rbm.utils.tensor_files import check_finite, fingerprint, read_sealed, sealed

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
STUDENT = "student.json"  # in a run folder, in the place of config.json
ENCODED = "encoding_columns"  # in either: HubMixin.encodings, where it is not 0
_PLAIN = (int, float, str, bool, type(None))


# Classes that a saved student may have, by name. ``import rbm`` registers this package's; a plugin registers its own.
STUDENTS: dict[str, type["HubMixin"]] = {}


class HubMixin:
    """``save_pretrained``, ``from_pretrained`` and ``push_to_hub`` for a module that plain arguments rebuild.

    A class that inherits from it can be named by a run folder or by ``config.json``: see :data:`STUDENTS`.

    Attributes:
        layer_type: class of the layers that take further arguments of the student, or None.
        encodings: how many columns of a row, the last ones, are encodings of the node's place in the graph; 0 where a
            row is features alone, or nothing is known of it.
        beside: what these columns are, in words.
    """

    layer_type: type | None = None
    encodings: int = 0
    beside: str = "encodings of the node's place in the graph"

    def __init_subclass__(cls, **options) -> None:
        super().__init_subclass__(**options)
        STUDENTS[cls.__name__] = cls

    def __new__(cls, *args, **kwargs):
        """Remember the arguments: they are all that rebuilds the module for its weights."""
        module = super().__new__(cls)
        given = inspect.signature(cls.__init__).bind_partial(module, *args, **kwargs)
        named = dict(list(given.arguments.items())[1:])
        for parameter in given.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                named |= named.pop(parameter.name, {})
        module.__dict__["_arguments"] = named if all(isinstance(v, _PLAIN) for v in named.values()) else None
        return module

    @property
    def row(self) -> str:
        """What a row of the student's input holds, in words."""
        features = f"{self.in_channels - self.encodings} features"
        if not self.encodings:
            return features
        return f"{features}, then {self.encodings} {self.beside}"

    @property
    def arguments(self) -> dict[str, Any]:
        """Those that rebuild the module for its weights.

        Raises:
            TypeError: they hold modules or tensors, which no file of plain values can.
        """
        if self._arguments is None:
            raise TypeError(
                f"this {type(self).__name__} was made from modules, or quantised; save one whose arguments are plain"
                " values"
            )
        return self._arguments

    @classmethod
    def from_config(cls, section: Any, **further: Any) -> "HubMixin":
        """A student with the settings of a section of the configuration, such as ``config.rbm``.

        Args:
            section: a dataclass; its fields that are arguments of the student, its bases or its layers are taken.
            further: what the section does not say, ``in_channels`` and ``out_channels``; or what shall differ from it.
        """
        makers = [*cls.__mro__, *([] if cls.layer_type is None else [cls.layer_type])]
        known = {name for maker in makers for name in inspect.signature(maker.__init__).parameters}
        taken = {item.name: getattr(section, item.name) for item in fields(section) if item.name in known}
        return cls(**taken | further)

    def save_pretrained(self, folder: Path | str, *, run: Path | str | None = None) -> None:
        """Write ``config.json``, ``model.safetensors`` and a model card into a folder.

        Args:
            folder: made where it is missing. A card that is there is kept where no ``run`` gives figures for a new one.
            run: run folder that the student comes from; the card gets its figures. The name of a graph's file is kept,
                its folder is not.

        Raises:
            ModuleNotFoundError: huggingface_hub is not installed.
            FileNotFoundError: ``run`` holds no finished run.
            ValueError: none of the students of ``run`` has these weights.
            TypeError: the student was made from arguments that no file can hold.
        """
        _huggingface_hub()
        self._save(Path(folder), str(folder), run)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        run: Path | str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload student",
    ) -> str:
        """Upload what :meth:`save_pretrained` writes, as one commit, and return the commit's address.

        Args:
            repo_id: ``OWNER/NAME``; made where it is missing.
            run: see :meth:`save_pretrained`. Without one a card that the Hub has stays.
            private: visibility of a new repository.
            token: of the Hub; by default the one that ``hf auth login`` stored.
            revision: branch to commit to.
            commit_message: title of the commit.

        Raises:
            ModuleNotFoundError, FileNotFoundError, ValueError, TypeError: as :meth:`save_pretrained`.
        """
        hub = _huggingface_hub()
        with tempfile.TemporaryDirectory() as folder:
            self._save(Path(folder), repo_id, run)
            api = hub.HfApi(token=token)
            api.create_repo(repo_id, private=private, exist_ok=True)
            if run is None and api.file_exists(repo_id, CARD, revision=revision):
                (Path(folder) / CARD).unlink()
            commit = api.upload_folder(
                repo_id=repo_id, folder_path=folder, revision=revision, commit_message=commit_message
            )
        return str(commit.commit_url)

    @classmethod
    def from_pretrained(cls, name: Path | str, **options) -> "HubMixin":
        """A student of this class as :func:`load` gives it, which see; ValueError where it is of another."""
        return load(name, kind=cls, **options)

    def _save(self, folder: Path, place: str, run: Path | str | None) -> None:
        from rbm.nn.model_card import model_card

        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        card = model_card(self, self.arguments, tensors, place, None if run is None else Path(run))
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CONFIG, describe(self))
        write_bytes(folder / WEIGHTS, sealed(tensors))
        if run is not None or not (folder / CARD).exists():
            write_text(folder / CARD, str(card))


def load(
    name: Path | str,
    *,
    kind: type[HubMixin] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: Path | str | None = None,
) -> HubMixin:
    """A student from a folder that ``save_pretrained`` wrote, from a run folder, or from the Hub; in eval mode, on the
    CPU.

    Args:
        name: the folder; or, where there is none of that name, ``OWNER/NAME`` on the Hub.
        kind: the class that it shall have; by default the one that it says, of those of this package.
        revision: branch, tag or commit on the Hub.
        token: of the Hub; by default the one that ``hf auth login`` stored.
        cache_dir: where downloads are kept.

    Raises:
        ModuleNotFoundError: it would have to come from the Hub, and huggingface_hub is not installed.
        FileNotFoundError: the folder lacks a file.
        ValueError: it is no student of this class, or its files are corrupt.
    """
    if Path(name).is_dir():
        config, weights = find_student(Path(name))
    else:
        hub = _huggingface_hub(f"{name} is no folder here, and students from the Hub")
        fetch = {"revision": revision, "token": token, "cache_dir": cache_dir}
        config, weights = (Path(hub.hf_hub_download(str(name), file, **fetch)) for file in (CONFIG, WEIGHTS))
    student = rebuild(config, weights, kind)
    if student.encodings:
        logging.getLogger("rbm").warning("%s: rows of this %s are %s.", name, type(student).__name__, student.row)
    return student


def describe(student: HubMixin, **further: Any) -> dict[str, Any]:
    """What :func:`rebuild` reads: class, arguments, a checksum of these, and the version that wrote it; ``further``
    keys are for others.
    """
    from rbm_kernels import __version__

    name, arguments = type(student).__name__, student.arguments
    checksum = _checksum(name, arguments)
    if student.encodings:
        further = {**further, ENCODED: student.encodings}
    return {**further, "class": name, "arguments": arguments, "checksum": checksum, "rbm_version": __version__}


def _checksum(name: str, arguments: dict[str, Any]) -> str:
    return fingerprint("student", [name, arguments])


def find_student(folder: Path, method: str | None = None) -> tuple[Path, Path]:
    """The files of a saved student: its description and its weights.

    A run folder describes its students in ``student.json``, by the methods whose weights are meant; any other folder
    has ``config.json`` and ``model.safetensors``, as on the Hub.

    Args:
        folder: where they are.
        method: whose student of a run folder is meant; by default the one that it keeps for predictions.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: ``student.json`` names no method, or the folder holds no student of ``method``.
    """
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


def read_description(config: Path, method: str | None = None) -> dict[str, Any]:
    """What the ``student.json`` of a run folder says of a student: the keys of :func:`describe` and its ``method``.

    Args:
        config: the file.
        method: whose student; by default the one that the folder keeps for predictions.

    Raises:
        ValueError: the file describes no student, or none of ``method``.
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
    """A method whose student a run folder does not hold."""


def rebuild(config: Path, weights: Path, kind: type[HubMixin] | None = None, *, method: str | None = None) -> HubMixin:
    """The student that a description and its weights make, in eval mode, on the CPU; of the students that a run folder
    describes, that of ``method``.

    Raises:
        ValueError: a file is corrupt, they do not belong together, or the class is not ``kind``.
    """
    kind, arguments, encodings = _described(config, kind, method)
    tensors, _ = read_sealed(weights, foreign=config.name != STUDENT)  # a phase's file is this package's own
    try:
        # Each layer has a tensor at least: an impossible number of layers would take forever to build.
        counts = [arguments.get(name) for name in ("num_layers", "members")]
        if math.prod(count for count in counts if isinstance(count, int)) > max(1, len(tensors)):
            raise ValueError(f"they ask for more layers than the {len(tensors)} tensors of {weights} make")
        if kind.__module__.startswith("rbm."):  # a class of others need not know what a meta tensor is
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # nothing is copied
                _load_state(kind(**arguments), tensors, weights)
        student = kind(**arguments)
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


class _UnfitError(ValueError):
    """Weights that do not fit a module."""


def fill(module: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Load the tensors of a file into a module; ValueError where they do not fit it, or are not finite."""
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
    config: Path, kind: type[HubMixin] | None, method: str | None
) -> tuple[type[HubMixin], dict[str, Any], int]:
    """Class, arguments, and how many columns of a row are encodings."""
    try:
        content = read_description(config, method) if config.name == STUDENT else read_json(config)
        name, arguments = content["class"], dict(content["arguments"])
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
    return known, arguments, encodings


def _huggingface_hub(what: str = "A model card and the Hub") -> ModuleType:
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{what} need huggingface_hub: pip install 'rbm-kernels[hub]'") from error
    return huggingface_hub

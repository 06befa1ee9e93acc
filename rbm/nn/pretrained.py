"""The base class of all students, which saves them to the Hugging Face Hub, or to a folder with the same layout.

Such a folder holds ``config.json`` (class and arguments), ``model.safetensors``, and ``README.md``, the model card.
Loading from a folder needs only this package. The card and the Hub need ``huggingface_hub``
(``pip install 'rbm-kernels[hub]'``), which is imported on first use.
"""

import inspect
import logging
import re
import tempfile
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from rbm.nn.saved_student import CONFIG, STUDENTS, WEIGHTS, describe, find_student, rebuild
from rbm.utils.files import as_path, write_bytes, write_json, write_text
from rbm.utils.plugins import is_of_package
from rbm.utils.tensor_files import sealed

CARD = "README.md"
_PLAIN = (int, float, str, bool, type(None))


class HubMixin:
    """``save_pretrained``, ``from_pretrained`` and ``push_to_hub`` for a module that can be rebuilt from plain values.

    Subclasses are registered under their name, so that a run folder or ``config.json`` can refer to them: see
    :data:`rbm.nn.saved_student.STUDENTS`. A subclass of your own is declared as ``class Mine(HubMixin, nn.Module)`` and
    made from numbers, strings and booleans, among them ``in_channels`` and ``out_channels``.

    Attributes:
        in_channels: width of a row, the argument of this name unless the class sets it.
        layer_type: class of the layers that receive the student's further keyword arguments, or None.
        encodings: how many columns at the end of a row are encodings of the node's place in the graph; 0 if a row has
            only features, or if this is unknown.
        beside: a description of these columns.
    """

    layer_type: type | None = None
    encodings: int = 0
    beside: str = "encodings of the node's place in the graph"

    def __init_subclass__(cls, **options) -> None:
        super().__init_subclass__(**options)
        known = STUDENTS.get(cls.__name__)
        if known is not None and known.__module__ != cls.__module__ and is_of_package(known):
            raise TypeError(
                f"class {cls.__name__} has the name of a student of this package ({known.__module__}), which saved"
                " students are found by; give yours another name"
            )
        STUDENTS[cls.__name__] = cls

    def __new__(cls, *args, **kwargs):
        """Store the arguments, so that the module can be rebuilt before its weights are loaded."""
        module = super().__new__(cls)
        given = inspect.signature(cls.__init__).bind_partial(module, *args, **kwargs)
        named = dict(list(given.arguments.items())[1:])
        for parameter in given.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                named |= named.pop(parameter.name, {})
        # NumPy scalars, such as y.max() + 1, are saved as Python numbers.
        named = {name: value.item() if isinstance(value, np.generic) else value for name, value in named.items()}
        module.__dict__["_arguments"] = named if all(isinstance(v, _PLAIN) for v in named.values()) else None
        if "in_channels" in named:
            module.__dict__["in_channels"] = named["in_channels"]
        return module

    @property
    def row(self) -> str:
        """Description of a row of the student's input."""
        features = f"{self.in_channels - self.encodings} features"
        if not self.encodings:
            return features
        return f"{features}, then {self.encodings} {self.beside}"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments from which the module is rebuilt.

        Raises:
            TypeError: they contain modules or tensors, which cannot be saved as plain values.
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
            section: a dataclass; the fields that are arguments of the student, its base classes or its layers are used.
            further: arguments that the section lacks, ``in_channels`` and ``out_channels``, or that override it.
        """
        makers = [*cls.__mro__, *([] if cls.layer_type is None else [cls.layer_type])]
        known = {name for maker in makers for name in inspect.signature(maker.__init__).parameters}
        settings = {item.name: getattr(section, item.name) for item in fields(section) if item.name in known}
        return cls(**settings | further)

    def save_pretrained(self, folder: Path | str, *, run: Path | str | None = None) -> None:
        """Write ``config.json``, ``model.safetensors`` and a model card into a folder.

        Args:
            folder: created if it does not exist. Without ``run``, an existing card is kept.
            run: run folder that the student comes from; the card shows its figures. If the graph was read from a file,
                the card names the file without its folder.

        Raises:
            ModuleNotFoundError: huggingface_hub is not installed.
            FileNotFoundError: ``run`` is not a finished run.
            ValueError: no student of ``run`` has these weights.
            TypeError: the student was made from arguments that cannot be saved.
        """
        _huggingface_hub()
        self._save(as_path("folder", folder), str(folder), run)

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
        """Upload the files of :meth:`save_pretrained` as one commit and return its URL.

        Args:
            repo_id: ``OWNER/NAME``; created if it does not exist.
            run: see :meth:`save_pretrained`. Without it, a card on the Hub is kept.
            private: visibility of a new repository.
            token: of the Hub; by default the one that ``hf auth login`` stored.
            revision: branch to commit to.
            commit_message: title of the commit.

        Raises:
            ModuleNotFoundError, FileNotFoundError, ValueError, TypeError: see :meth:`save_pretrained`.
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
        """Load a student of this class; ValueError if it has another class. See :func:`load` for the arguments."""
        return load(name, kind=cls, **options)

    def _save(self, folder: Path, place: str, run: Path | str | None) -> None:
        from rbm.nn.model_card import model_card

        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        card = model_card(self, self.arguments, tensors, place, None if run is None else as_path("run", run))
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
    """Load a student from a folder written by ``save_pretrained``, from a run folder, or from the Hub. It is in eval
    mode and on the CPU.

    Args:
        name: the folder; if there is no such folder, ``OWNER/NAME`` on the Hub.
        kind: the expected class; by default, any registered class that the files name.
        revision: branch, tag or commit on the Hub.
        token: of the Hub; by default the one that ``hf auth login`` stored.
        cache_dir: folder for downloads.

    Raises:
        ModuleNotFoundError: there is no such folder, and huggingface_hub, which the Hub needs, is not installed.
        FileNotFoundError: there is no such folder and ``name`` cannot be a name on the Hub, or the folder lacks a file.
        ValueError: the student has another class, or its files are corrupt.
    """
    if (folder := as_path("name", name)).is_dir():
        config, weights = find_student(folder)
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)):
        raise FileNotFoundError(f"{name} is no folder here, and no OWNER/NAME of the Hub; expected one of them")
    else:
        hub = _huggingface_hub(f"{name} is no folder here, and students from the Hub")
        fetch = {"revision": revision, "token": token, "cache_dir": cache_dir}
        config, weights = (Path(hub.hf_hub_download(str(name), file, **fetch)) for file in (CONFIG, WEIGHTS))
    student = rebuild(config, weights, kind)
    if student.encodings:
        logging.getLogger("rbm").warning("%s: rows of this %s are %s.", name, type(student).__name__, student.row)
    return student


def _huggingface_hub(what: str = "A model card and the Hub") -> ModuleType:
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{what} need huggingface_hub: pip install 'rbm-kernels[hub]'") from error
    return huggingface_hub

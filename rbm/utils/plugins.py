"""Plugins: methods, teachers and datasets from a user's Python file; CONTRIBUTING.md shows one of each.

A plugin adds entries to ``rbm.distillation.registry.METHODS``, ``rbm.teachers.TEACHERS`` or
``rbm.datasets.DATASETS``. They can then be used like the package's own, on the command line (``rbm --plugin FILE
distill --method NAME``), in experiments and in their worker processes.
"""

import hashlib
import importlib.util
import inspect
import sys
import traceback
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from rbm.utils.files import as_path

# What a plugin may add to: module and name of a dictionary, and what its entries are called.
_REGISTRIES = (
    ("rbm.distillation.registry", "METHODS", "method"),
    ("rbm.teachers", "TEACHERS", "teacher"),
    ("rbm.datasets", "DATASETS", "dataset"),
)
_loaded: list[str] = []


def load_plugin(path: Path | str) -> None:
    """Run a Python file, once.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not a ``.py`` file, it raises an error, or what it adds is of another kind than expected or
            has the name of a method, teacher or dataset of the package.
    """
    path = as_path("plugin", path).resolve()
    if str(path) in _loaded:
        return
    if path.suffix != ".py":
        raise ValueError(f"plugin is {path}, expected a Python file that ends in .py")
    if not path.is_file():
        raise FileNotFoundError(f"plugin {path} does not exist")
    # Importable under a unique name, so that its classes can be pickled; two files may have the same name.
    name = f"rbm_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    registries = [(getattr(import_module(place), entries), kind) for place, entries, kind in _REGISTRIES]
    before = [dict(entries) for entries, _ in registries]
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        for (entries, kind), known in zip(registries, before, strict=True):
            _check_added(kind, entries, known)
    except (Exception, SystemExit) as error:
        for (entries, _), known in zip(registries, before, strict=True):
            entries.clear()
            entries.update(known)
        del sys.modules[name]
        line = error.lineno if isinstance(error, SyntaxError) else _line(error, path)
        place = "" if line is None else f" in line {line}"
        raise ValueError(f"plugin {path} failed{place}: {type(error).__name__}: {error}") from error
    _loaded.append(str(path))


def is_of_package(made_by: Any) -> bool:
    """Whether a class or a function is of this package, by its module; also anything without a module, such as None."""
    return getattr(made_by, "__module__", "rbm.").startswith("rbm.")


def _check_added(kind: str, entries: dict[str, Any], before: dict[str, Any]) -> None:
    """Raise unless all entries that are new are what entries of this kind must be, and none replaces the package's."""
    for name, entry in entries.items():
        known = before.get(name)
        if known is entry:
            continue
        # A class or a function is of the package if its module is; a named graph, if it has no loader.
        made_by = known if kind == "teacher" else getattr(known, "train" if kind == "method" else "loader", None)
        if known is not None and is_of_package(made_by):
            raise ValueError(f"{kind} {name!r} is the package's; give yours another name")
        fits, expected = _expected(kind, entry)
        if not fits:
            shown = entry.__name__ if inspect.isclass(entry) else f"a {type(entry).__name__}"
            raise TypeError(f"{kind} {name!r} is {shown}, expected {expected}")
        if kind == "dataset" and entry.name != name:
            raise ValueError(f"dataset {name!r} has the name {entry.name!r} in its DatasetInfo; give both the same")
        if kind == "dataset" and (other := import_module("rbm.datasets").find_dataset(name)) is not entry:
            raise ValueError(f"dataset {name!r} is another name of {other.name!r}; give yours another one")


def _expected(kind: str, entry: Any) -> tuple[bool, str]:
    """Whether an entry is what it must be, and a description of that."""
    from torch import nn

    if kind == "teacher":
        fits = inspect.isclass(entry) and issubclass(entry, nn.Module) and entry.forward is not nn.Module.forward
        return fits, "a subclass of torch.nn.Module with a method forward(x, edge_index)"
    place, name = {
        "method": ("rbm.distillation.registry", "Method"),
        "dataset": ("rbm.datasets", "DatasetInfo"),
    }[kind]
    return isinstance(entry, getattr(import_module(place), name)), f"a {name} of {place}"


def _line(error: BaseException, path: Path) -> int | None:
    """The last line of the file in the error's traceback; None if the file could not even be compiled."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == str(path)), None)


@lru_cache(maxsize=32)  # the code that runs is that of the first call, whatever happens to the file later
def checksum_of_own_code(made_by: type) -> str | None:
    """A checksum of the file that defines a class of the user; None for the package's, and if there is no such file."""
    if is_of_package(made_by):
        return None
    try:
        content = Path(inspect.getfile(made_by)).read_bytes()
    except (OSError, TypeError):  # it was defined in an interactive session, for example
        return None
    return hashlib.sha256(content).hexdigest()[:16]


def loaded_plugins() -> tuple[str, ...]:
    """The plugin files loaded so far, which worker processes load as well."""
    return tuple(_loaded)

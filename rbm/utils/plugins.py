"""Plugins: methods, teachers and datasets from a user's Python file; CONTRIBUTING.md shows one of each.

A plugin adds entries to ``rbm.distillation.registry.METHODS``, ``rbm.teachers.TEACHERS`` or
``rbm.datasets.DATASETS``. They can then be used like the package's own, on the command line (``rbm --plugin FILE
distill --method NAME``), in experiments and in their worker processes.
"""

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path

_loaded: list[str] = []


def load_plugin(path: Path | str) -> None:
    """Run a Python file, once.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not a ``.py`` file, or it raises an error.
    """
    path = Path(path).resolve()
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
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        line = error.lineno if isinstance(error, SyntaxError) else _line(error, path)
        place = "" if line is None else f" in line {line}"
        raise ValueError(f"plugin {path} failed{place}: {type(error).__name__}: {error}") from error
    _loaded.append(str(path))


def _line(error: BaseException, path: Path) -> int | None:
    """The last line of the file in the error's traceback; None if the file could not even be compiled."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == str(path)), None)


def loaded_plugins() -> tuple[str, ...]:
    """The plugin files loaded so far, which worker processes load as well."""
    return tuple(_loaded)

"""Results in a run folder, read so that a damaged file is told by its name, with what writes it anew."""

from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Any

from rbm.utils.files import read_json

_WRITTEN_BY = {
    "summary.json": "rbm distill --resume",
    "timings.json": "rbm distill --resume",
    "report.json": "rbm report",
    "latency.json": "rbm latency",
}


def read_results(path: Path) -> "_Values":
    """The values of a JSON file of a run. A name that it lacks raises ValueError when it is looked up, not KeyError.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not JSON, or not an object.
    """
    try:
        return _named(read_json(path), path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; restore it, or {_written_by(path)}") from error
    except ValueError as error:
        raise ValueError(f"{error}; {_remedy(path)}") from error


def check_kind(values: "_Values", names: Iterable[str], kind: type | UnionType, expected: str) -> None:
    """Raise ValueError unless the values of these names in :func:`read_results` or in a part of it are of a ``kind``,
    which the message calls ``expected``.
    """
    for name in names:
        if not isinstance(values[name], kind):
            raise ValueError(
                f"{values.path} has {values[name]!r} as {name!r}, expected {expected}, as a run writes it;"
                f" {_remedy(values.path)}"
            )


class _Values(dict):
    """Values of a file, by name."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        super().__init__(values)
        self.path = path

    def __missing__(self, name: str) -> None:
        raise ValueError(f"{self.path} lacks {name!r}, which a run writes; {_remedy(self.path)}")


def _named(value: Any, path: Path) -> Any:
    if isinstance(value, dict):
        return _Values({name: _named(inner, path) for name, inner in value.items()}, path)
    return [_named(inner, path) for inner in value] if isinstance(value, list) else value


def _remedy(path: Path) -> str:
    return f"restore it, or remove it: {_written_by(path)}"


def _written_by(path: Path) -> str:
    return f"{_WRITTEN_BY[path.name]} writes it anew"

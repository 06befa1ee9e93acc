"""Results in a run folder, read so that a damaged file is told by its name, with what writes it anew."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rbm.utils.files import read_json

_WRITTEN_BY = {
    "summary.json": "rbm distill --resume",
    "timings.json": "rbm distill --resume",
    "report.json": "rbm report",
    "latency.json": "rbm latency",
}


def read_results(path: Path) -> dict[str, Any]:
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


@contextmanager
def results_of(folders: Sequence[Path]) -> Iterator[None]:
    """Turn errors about values of another type than a run writes into ValueError, which names the files."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, ArithmeticError, ValueError) as error:
        if isinstance(error, ValueError) and any(str(folder) in str(error) for folder in folders):
            raise  # it names the file
        raise ValueError(
            f"run {', '.join(map(str, folders))}: {', '.join(_WRITTEN_BY)} or metrics.jsonl holds something else than a"
            f" run writes ({type(error).__name__}: {error}); restore them, or remove the first four:"
            f" {', '.join(dict.fromkeys(_WRITTEN_BY.values()))} write them anew"
        ) from error


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

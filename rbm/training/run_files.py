"""The list of files that this package wrote into a run folder. Only these are ever removed."""

import re
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from rbm.utils.files import read_json, write_json

MARKER = "run.json"
CHECKPOINT = "checkpoint.pt"
# Besides models and tables. Other commands write other files into a run folder, also while a run is resumed.
_OF_RUNS = {
    *(CHECKPOINT, "auto.csv", "auto.yaml", "config.yaml", "inputs.json", "metrics.jsonl", "node_ids.csv"),
    *("results.md", "student.json", "summary.json", "timings.json"),
}
_EVENTS = "tensorboard"  # a folder; only TensorBoard's event files in it are removed
# What a run writes before its configuration or, with a search, before auto.yaml: locks, the list, and partial files.
_FIRST = re.compile(rf"{re.escape(MARKER)}|\..+\.lock(\.pid)?|\.({re.escape(MARKER)}|(config|auto)\.yaml)-\w+\.partial")


def begin_list(folder: Path) -> None:
    """Make ``folder`` a run folder: write the list, empty, unless it has one."""
    if not (folder / MARKER).is_file():
        write_json(folder / MARKER, {"format": 1, "files": []})


def is_unused(folder: Path) -> bool:
    """Whether ``folder`` does not exist, is empty, or has only what a run leaves that was killed at its very start."""
    if not folder.is_dir():
        return not folder.exists()
    return all(_FIRST.fullmatch(file.name) for file in folder.iterdir())


def file_of(name: str, method: str | None, quantize: str | None = None) -> str:
    """The name of a file about the kept student or that of a method, possibly quantised: ``latency.json``,
    ``latency-rbm.json``, ``latency-rbm-int8.json``.
    """
    stem, dot, ending = name.partition(".")
    return "-".join(part for part in (stem, method, quantize) if part is not None) + dot + ending


def list_file(file: Path) -> None:
    """Add a file, or the folder ``tensorboard``, to the list of its folder before it is written.

    A folder without a list is not a run folder and does not get one.
    """
    marker = file.parent / MARKER
    if marker.is_file() and file.name not in listed_files(file.parent):
        with _writing_list(file.parent):  # two exports at once must both be listed
            if file.name not in (names := listed_files(file.parent)):  # by another process in the meantime
                write_json(marker, {"format": 1, "files": [*names, file.name]})


def listed_files(folder: Path) -> list[str]:
    """The names on the list.

    Raises:
        FileExistsError: the list is missing or damaged, so that the files of the run are unknown.
    """
    marker = folder / MARKER
    try:
        names = read_json(marker)["files"]
        if isinstance(names, list) and all(isinstance(name, str) and name == Path(name).name for name in names):
            return names
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise FileExistsError(
        f"{folder} is not a run folder of this version (no valid {MARKER}, the list of what a run wrote), so"
        " --overwrite leaves it alone; restore that file, use another --out, or remove what is not needed yourself"
    )


def remove_run(folder: Path) -> None:
    """Remove the files on the list, and leave all others.

    Raises:
        FileExistsError: see :func:`listed_files`; nothing was removed.
    """
    if is_unused(folder):
        for left in folder.glob(".*.partial"):
            left.unlink()
        return
    for file in list(_present(folder, listed_files(folder))):
        file.unlink(missing_ok=True)  # a list of an earlier version may have a name twice
    (folder / MARKER).unlink()


def remove_partials(folder: Path) -> None:
    """Remove what a killed run left of the files that only a run writes; call it under the lock of the run."""
    for name in listed_files(folder):
        if name in _OF_RUNS or name.endswith(".safetensors"):
            for left in _partials(folder, name):
                left.unlink(missing_ok=True)
    with _writing_list(folder):
        for left in _partials(folder, MARKER):
            left.unlink()


def _writing_list(folder: Path) -> FileLock:
    return FileLock(folder / f".{MARKER}.lock")


def _present(folder: Path, names: list[str]) -> Iterator[Path]:
    for name in names:
        if name == _EVENTS:
            yield from folder.glob(f"{_EVENTS}/*/events.out.tfevents.*")
        elif (folder / name).is_file() or (folder / name).is_symlink():
            yield folder / name
        yield from _partials(folder, name)


def _partials(folder: Path, name: str) -> Iterator[Path]:
    """The partial files of a file, which killed processes were writing."""
    return folder.glob(f".{name}-*.partial")

"""The rows of an experiment's CSV file, one per trained model with its provenance: reading and appending them."""

import csv
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch_geometric

from rbm.config import LATER_SETTINGS, Config
from rbm.distillation.registry import METHODS, learns_soft_labels
from rbm.utils.environment import today
from rbm.utils.files import append_csv, as_path, read_text, write_text
from rbm.utils.tensor_files import fingerprint

KEY = ("dataset", "setting", "protocol", "teacher", "preset", "variant", "method", "seed")
ACCURACIES = ("test_at_best_val", "val", "test_max")
COLUMNS = (
    *KEY,
    *ACCURACIES,
    *("best_epoch", "epochs", "seconds", "parameters", "active_parameters"),
    *("config", "commit", "date", "python", "torch", "torch_geometric", "threads"),
)


def figures(result: dict[str, Any], timing: dict[str, Any]) -> dict[str, str]:
    """Accuracies, epochs and size of a model from its part of a run's summary, and the seconds of its training.

    The seconds are empty if the model was taken from the cache, and its size is if only its logits were given.
    """
    size = {name: result[name] for name in ("parameters", "active_parameters")}
    return {
        "test_at_best_val": f"{result['test_accuracy']:.5f}",
        "val": f"{result['val_accuracy']:.5f}",
        "test_max": f"{result['test_max']:.5f}",
        "best_epoch": str(result["best_epoch"]),
        "epochs": str(result["epochs"]),
        "seconds": "" if timing.get("cached") else f"{timing['seconds']:.2f}",
        **{name: "" if count is None else str(count) for name, count in size.items()},
    }


def made_by(config: Config, method: str, graph: str = "") -> dict[str, str]:
    """The provenance of a row: settings, code, versions, threads, and date.

    ``graph`` is the checksum of the graph's files (:func:`rbm.datasets.load.graph_checksum`). If there is one, it
    follows the fingerprint of the settings after a hyphen.
    """
    return {
        "config": "-".join(filter(None, (config_fingerprint(config, method), graph))),
        "commit": _commit(),
        "date": today(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__,
        "threads": str(torch.get_num_threads()),
    }


def config_fingerprint(config: Config, method: str) -> str:
    """A hash of all settings that a method's result may depend on.

    These are the settings outside sections (except for the data's folder), the sections that the method reads, and
    ``distill.source`` if it learns soft labels. ``inflate`` widens students alone, so a teacher does not depend on it.
    A setting that was added later counts only if its value differs from that of all earlier rows.
    """
    if method == "teacher":
        config = replace(config, inflate=1)
    read = ("teacher",) if method == "teacher" else METHODS[method].sections
    if "teacher" in read:
        read += config.teacher_sections
    kept = {name: value for name, value in asdict(config).items() if name in read or not isinstance(value, dict)}
    source = config.distill.source
    if "distill" not in read and learns_soft_labels(method) and source != LATER_SETTINGS["distill"]["source"]:
        kept["distill"] = {"source": source}
    return fingerprint("config", {**_without_former(kept, LATER_SETTINGS), "root": ""})


def _without_former(values: dict[str, Any], former: dict[str, Any]) -> dict[str, Any]:
    """Remove settings with the value that all runs had before the setting existed; sections may be nested."""
    kept = {}
    for key, value in values.items():
        if isinstance(value, dict):
            kept[key] = _without_former(value, former.get(key, {}))
        elif key not in former or value != former[key]:
            kept[key] = value
    return kept


@lru_cache(maxsize=1)
def _commit() -> str:
    """The commit of this package's source, with a plus if the tree has changes; empty outside a checkout."""
    where = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*where, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*where, "status", "--porcelain", "."], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "")


def read_rows(path: Path | str) -> list[dict[str, str]]:
    """The rows of an experiment's CSV file; empty if it does not exist. A last line truncated by a kill is ignored.

    Raises:
        ValueError: the file is not text, its columns are not :data:`COLUMNS`, or a row is damaged or there twice. The
            message names the file and the line.
    """
    path = as_path("results file", path)
    if not path.is_file():
        return []
    text = _whole_lines(read_text(path).removeprefix("\ufeff"))  # spreadsheets write a byte order mark
    reader = csv.DictReader(text.splitlines())
    rows: list[dict[str, str]] = []
    lines: dict[tuple[str, ...], int] = {}
    try:
        if text and reader.fieldnames != list(COLUMNS):
            expected = f"expected {','.join(COLUMNS)}, separated by commas"
            problem = _header_problem(reader.fieldnames or [])
            raise ValueError(f"{path}: line 1 {problem}; {expected}; repair it, or write to another file")
        for row in reader:
            line = reader.line_num
            if problem := _row_problem(row):
                raise ValueError(f"{path}: line {line} {problem}; repair or remove it")
            if (first := lines.setdefault(row_key(row), line)) != line:
                what = " ".join(filter(None, row_key(row)))
                raise ValueError(f"{path}: lines {first} and {line} are both the row of {what}; remove one of them")
            rows.append(row)
    except csv.Error as error:
        raise ValueError(f"{path} is no table of results: {error}") from error
    return rows


def _header_problem(found: Sequence[str]) -> str:
    missing = [name for name in COLUMNS if name not in found]
    surplus = [name for name in found if name not in COLUMNS]
    if not missing and not surplus:
        return "has the columns in another order"
    lacks = f"lacks the columns {','.join(missing)}" if missing else ""
    has = f"has the columns {', '.join(map(repr, surplus))}, which no result has" if surplus else ""
    return " and ".join(filter(None, [lacks, has]))


def _row_problem(row: dict[str, str]) -> str:
    """What is wrong with a row, apart from columns that no table reads as numbers; empty if nothing is."""
    # DictReader fills missing columns with None, and collects surplus ones under the key None.
    if None in row or None in row.values():
        return f"has not the {len(COLUMNS)} columns of a result"
    if re.fullmatch("0|[1-9][0-9]*", row["seed"]) is None:
        return f"has the seed {row['seed']!r}, expected a whole number such as 0"
    for name in ACCURACIES:
        try:
            fits = 0.0 <= float(row[name]) <= 1.0  # false for NaN
        except ValueError:
            fits = False
        if not fits:
            return f"has {row[name]!r} as {name}, expected a number from 0 to 1"
    return ""


def _whole_lines(text: str) -> str:
    """``text`` with a newline at its end, without a last line that lacks columns because of a kill.

    A single line that is not the beginning of a header is no such line: the file is not one of results.
    """
    before, newline, last = text.rpartition("\n")
    if not last or not (newline or ",".join(COLUMNS).startswith(last)):
        return text
    try:
        fields = next(csv.reader([last]))
    except csv.Error:
        return before + newline
    return f"{text}\n" if len(fields) == len(COLUMNS) and fields[-1] else before + newline


def row_key(row: dict[str, str]) -> tuple[str, ...]:
    """The columns that identify a row."""
    return tuple(row[name] for name in KEY)


def append_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """Append rows to a file that :func:`read_rows` has read, or create it."""
    if path.exists():
        text = read_text(path)
        if (whole := _whole_lines(text)) != text:
            write_text(path, whole)
    append_csv(path, rows, COLUMNS)

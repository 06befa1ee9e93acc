"""Files of predictions, written in chunks: ``.csv``, ``.npy`` or ``.parquet``."""

import csv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from rbm.utils.files import check_ending, check_writable, optional, same_file, write_atomically
from rbm.utils.locks import locked_partial, remove_abandoned

# add(first row, probabilities [b, C]), to be called in order.
Add = Callable[[int, np.ndarray], None]
# names(start, stop) returns the ids of rows, for a column of their own.
Names = Callable[[int, int], list[str]]


def check_predictions(out: Path | str, inputs: dict[str, Path | str | None]) -> Path:
    """The file of predictions to write, before anything is computed.

    Args:
        out: the file.
        inputs: the files that are read, by what they are; None for one that is not given.

    Raises:
        FileNotFoundError: its folder does not exist.
        ModuleNotFoundError: Parquet without ``pyarrow``.
        ValueError: another ending than ``.csv``, ``.npy`` or ``.parquet``, or one of the inputs.
    """
    out = check_ending("predictions file", out, _WRITE)
    if out.suffix == ".parquet":
        optional("pyarrow", "files", f"predictions file {out}", "or write .csv or .npy")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"predictions file {out}: folder {out.parent} does not exist; make it, or name another")
    check_writable(f"predictions file {out}", out.parent)
    for name, given in inputs.items():
        if given is not None and same_file(out, given):
            raise ValueError(f"predictions file {out} is the {name} file; name another to write to")
    return out


def write_predictions(out: Path, fill: Callable[[Add], None], names: Names | None = None) -> None:
    """Write a file under a temporary name, and rename it when ``fill`` has added all rows.

    Temporary files of the same name that killed processes left are removed first: each may be as large as ``out``.

    Raises:
        ValueError: probabilities are not finite; ``out`` is not changed.
    """
    remove_abandoned(out)
    with ExitStack() as until_renamed:

        def write(partial: Path) -> None:
            until_renamed.enter_context(locked_partial(partial))
            with _WRITE[out.suffix](partial, names) as add:

                def add_finite(first: int, probabilities: np.ndarray) -> None:
                    if (bad := np.flatnonzero(~np.isfinite(probabilities).all(axis=1))).size:
                        raise ValueError(
                            f"predictions file {out}: the features of row {first + bad[0]} (counted from 0) are so"
                            " large that the student's answer is not finite; scale them as in training"
                        )
                    add(first, probabilities)

                fill(add_finite)

        write_atomically(out, write)


@contextmanager
def _write_csv(path: Path, names: Names | None) -> Iterator[Add]:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["row", *(["id"] if names else []), "class", "probability"])

        def add(first: int, probabilities: np.ndarray) -> None:
            classes, shares = probabilities.argmax(axis=1).tolist(), probabilities.max(axis=1).tolist()
            rows = range(first, first + len(classes))
            ids = [names(rows.start, rows.stop)] if names else []
            writer.writerows(zip(rows, *ids, classes, [f"{share:.6f}" for share in shares], strict=True))

        yield add


@contextmanager
def _write_npy(path: Path, names: Names | None) -> Iterator[Add]:
    with open(path, "wb") as file:
        shape = None

        def header() -> None:
            # NumPy pads the header so that the first dimension can grow; it is rewritten at the end.
            content = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, content)

        def add(first: int, probabilities: np.ndarray) -> None:
            nonlocal shape
            rows, classes = probabilities.shape
            if shape is None:
                shape = (0, classes)
                header()
            file.write(np.ascontiguousarray(probabilities, dtype="<f4"))
            shape = (first + rows, classes)

        yield add
        file.seek(0)
        header()


@contextmanager
def _write_parquet(path: Path, names: Names | None) -> Iterator[Add]:
    import pyarrow
    from pyarrow import parquet

    fields = [("row", pyarrow.int64()), ("class", pyarrow.int32()), ("probability", pyarrow.float32())]
    schema = pyarrow.schema([fields[0], *([("id", pyarrow.string())] if names else []), *fields[1:]])
    with parquet.ParquetWriter(path, schema) as writer:

        def add(first: int, probabilities: np.ndarray) -> None:
            rows = np.arange(first, first + len(probabilities))
            ids = [names(first, first + len(rows))] if names else []
            columns = [rows, *ids, probabilities.argmax(axis=1).astype(np.int32), probabilities.max(axis=1)]
            writer.write_table(pyarrow.table(columns, schema=schema))

        yield add


_WRITE = {".csv": _write_csv, ".npy": _write_npy, ".parquet": _write_parquet}

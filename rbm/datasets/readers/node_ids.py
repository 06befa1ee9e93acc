"""Ids of nodes in tables: strings or numbers that stand for rows of the features.

A column called ``id`` or ``node_id`` in the table of features names its rows. Edges, and tables of labels, masks and
logits with such a column, then refer to nodes by these ids. Ids are compared as text.
"""

import codecs
import csv
import hashlib
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rbm.datasets.readers.parquet import TextColumnError, check_columns, is_list, numbers
from rbm.datasets.readers.text import first_line_fault, is_blank, is_number
from rbm.utils.files import as_path, optional, read_json

if TYPE_CHECKING:
    import pyarrow

COLUMNS = ("id", "node_id")
FILE = "node_ids.csv"  # in a run folder
INPUTS, IDS = "inputs.json", "node_ids"  # there too: hashes of what a run was given; the one of its ids
NEW = -1  # a row that is no node
_NAMED = 5
_LONGEST_LINE = 2**28
MOST_EXACT = 2.0**53  # up to here, floating-point numbers hold whole numbers exactly
_FLAGS = {"0", "1", "0.0", "1.0", "true", "false"}
# Words in usual names of the columns of an edge list, such as from_node or sourceId.
_ENDS = {
    *("from", "to", "source", "target", "src", "dst", "dest", "destination", "start", "end", "head", "tail"),
    *("sender", "receiver", "node", "nodes", "vertex", "id", "ids", "u", "v"),
}


class NodeIds:
    """The ids of all nodes.

    Args:
        names: distinct ids, in the order of the nodes.
        source: where they come from, for messages.

    Raises:
        ValueError: an id is empty or occurs twice.
    """

    def __init__(self, names: "pyarrow.Array", source: Path) -> None:
        self.names, self.source = names, source
        compute = _compute(source)
        if names.null_count or compute.any(compute.equal(names, "")).as_py():
            raise ValueError(f"{source} has an empty id, expected one for each row")
        counts = compute.value_counts(names)
        twice = counts.filter(compute.greater(counts.field("counts"), 1)).field("values")
        if len(twice):
            raise ValueError(
                f"{source} holds {_listed(twice)} more than once, expected distinct ids; keep one row for each node"
            )

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"NodeIds({len(self)})"

    def rows(self, ids: "pyarrow.Array") -> np.ndarray:
        """The node of each id, int64 ``[n]``; :data:`NEW` if there is none."""
        found = _compute(self.source).index_in(ids, value_set=self.names)
        return found.fill_null(NEW).to_numpy(zero_copy_only=False).astype(np.int64)

    def of(self, nodes: np.ndarray) -> list[str]:
        """The ids of nodes, int64 ``[n]``; empty for :data:`NEW`."""
        import pyarrow

        return self.names.take(pyarrow.array(nodes, mask=nodes < 0)).fill_null("").to_pylist()

    def to_csv(self) -> str:
        """The content of :data:`FILE`: a header, then one id per line, in the order of the nodes."""
        return "".join(f"{_quoted(name)}\n" for name in (COLUMNS[0], *self.names.to_pylist()))

    def checksum(self) -> str:
        """A hash of the ids and their order, in hexadecimal digits."""
        return hashlib.sha256(self.to_csv().encode()).hexdigest()[:16]

    @classmethod
    def of_run(cls, run: Path | str, nodes: int | None = None) -> "NodeIds | None":
        """The ids in a run folder, or None if its graph has none.

        Raises:
            ValueError: they are not as the run wrote them, or not those of ``nodes`` nodes.
        """
        run = as_path("run", run)
        path, inputs = run / FILE, run / INPUTS
        ids = cls(_texts(path, header=True)[0], path) if path.is_file() else None
        if ids is not None and nodes not in (None, len(ids)):
            raise ValueError(
                f"{path} has {len(ids)} ids, and the graph of the run {nodes} nodes; restore the run folder"
            )
        stored = read_json(inputs).get(IDS) if inputs.is_file() else None  # runs of earlier versions have none
        if stored is not None and (ids is None or ids.checksum() != stored):
            raise ValueError(f"{path} is missing, or not as the run wrote it; restore the run folder")
        return ids


def _quoted(name: str) -> str:
    """A field of a ``.csv`` file. Python's writer leaves a carriage return bare, and readers end the line there."""
    return '"' + name.replace('"', '""') + '"' if re.search(r'[",\r\n]', name) else name


def id_column(path: Path) -> str | None:
    """The name of the column of ids in a ``.csv`` or ``.parquet`` table; None without one or in another format.

    Raises:
        ValueError: there are two; the other one would be read as a feature.
    """
    found = [name for name in column_names(path) if name.strip().lower() in COLUMNS]
    if len(found) > 1:
        raise ValueError(f"{path} has ids in {' and '.join(map(repr, found))}, expected one of them; drop the other")
    return found[0] if found else None


def lacks_header(path: Path, ids: NodeIds) -> bool:
    """Whether a ``.csv`` with several columns begins with the id of a node that is no number, instead of a header."""
    import pyarrow

    first, *others = column_names(path) or [""]
    return bool(others) and not is_number(first) and ids.rows(pyarrow.array([first]))[0] >= 0


def read_named_rows(path: Path, *, lacking: float | None = None) -> tuple["pyarrow.Array", Tensor | None]:
    """Ids and numbers ``[N, columns]`` of a table with a column of ids; None if it has no other column.

    A list of numbers counts as that many columns.

    Args:
        path: the table.
        lacking: the number for an empty field; None if there must be none.

    Raises:
        ValueError: a column does not hold numbers, or a field is empty.
    """
    import pyarrow

    name = id_column(path)
    table = _read(path, texts=[name], header=True)
    if not table.num_rows:
        raise ValueError(f"{path} has no row below its header, expected a row for each node")
    ids, rest = _as_text(path, name, table[name]), table.drop_columns([name])
    columns = []
    for other, column in zip(rest.column_names, rest.columns, strict=True):
        if column.null_count and not is_list(column.type):
            if lacking is None:
                raise ValueError(
                    f"{path} has {column.null_count} empty fields in its column {other!r}, expected numbers; fill them"
                    " in"
                )
            column = _filled(column, lacking)
        columns.append(column)
    try:
        check_columns(rest.schema)
        values = numbers(pyarrow.table(columns, rest.column_names)) if columns else None
    except TextColumnError:
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return ids, None if values is None else torch.from_numpy(values.astype(np.float64))


def read_by_ids(path: Path, ids: NodeIds, *, lacking: float | None = None) -> Tensor:
    """The rows of a table with a column of ids, in the order of the nodes; nodes of a table of ids alone.

    Args:
        path: the table.
        ids: the ids of the graph.
        lacking: the number for nodes that the table lacks and for empty fields; None if it must have all.

    Raises:
        ValueError: an id is unknown or occurs twice, or a node is lacking.
    """
    names, values = read_named_rows(path, lacking=lacking)
    rows = _known(NodeIds(names, path).names, ids, path)
    if values is None:
        return torch.from_numpy(rows)
    if len(rows) < len(ids) and lacking is None:
        absent = ids.of(np.setdiff1d(np.arange(len(ids)), rows))
        raise ValueError(
            f"{path} lacks {_listed(absent)}, expected a row for each of the {len(ids)} nodes in {ids.source}"
        )
    ordered = torch.full((len(ids), values.size(1)), 0.0 if lacking is None else lacking, dtype=torch.float64)
    ordered[torch.from_numpy(rows)] = values
    return ordered


def read_edges(path: Path, ids: NodeIds) -> Tensor:
    """Edges ``[2, M]`` from a table of two columns of ids. Edges with an unknown id are left out, with a warning.

    The first line of a ``.csv`` is a header if it names no node and its names are usual ones for the ends of an edge,
    or have no digit although each id has one. Any other first line is an edge.

    Raises:
        ValueError: another number of columns, or most edges have an unknown id.
    """
    if is_blank(path):
        return torch.empty(2, 0, dtype=torch.int64)
    columns = _texts(path)
    if len(columns) != 2:
        remedy = "; separate them by a comma or a tab" if len(columns) == 1 else "; edge weights are not used"
        raise ValueError(f"{path} has {len(columns)} columns, expected two, from and to{remedy}")
    edges = np.stack([ids.rows(column) for column in columns])
    header = int(path.suffix == ".csv" and _names_ends(columns, edges, ids))
    edges, texts = edges[:, header:], [column[header:] for column in columns]
    if (unknown := (edges < 0).any(axis=0)).any():
        names = [text.filter(_mask(each < 0)) for text, each in zip(texts, edges, strict=True)]
        message = (
            f"{path}: {int(unknown.sum()):,} of {unknown.size:,} edges name nodes that {ids.source} lacks:"
            f" {_listed([name for each in names for name in each.to_pylist()])}"
        )
        if path.suffix == ".csv" and not header and (edges[:, 0] < 0).all():
            message = f"{message} (line 1, {','.join(text[0].as_py() for text in texts)!r}, counts as an edge)"
        if 2 * unknown.sum() > unknown.size:
            raise ValueError(f"{message}; expected values of its column {id_column(ids.source)!r}")
        logging.getLogger("rbm").warning("dataset: %s; these edges are left out.", message)
    return torch.from_numpy(edges[:, ~unknown])


def _names_ends(columns: list["pyarrow.Array"], edges: np.ndarray, ids: NodeIds) -> bool:
    """Whether the first of these lines is a header, see :func:`read_edges`; ``edges`` are the nodes of their ids."""
    if not edges.shape[1] or (edges[:, 0] >= 0).any():
        return False
    names = [column[0].as_py() for column in columns]
    if any(re.search(r"\d", name) for name in names):
        return False
    words = [word.lower() for name in names for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]
    digits = _compute(ids.source).match_substring_regex(ids.names, r"\d")
    return (bool(words) and _ENDS.issuperset(words)) or _compute(ids.source).all(digits).as_py()


def read_mask(path: Path, ids: NodeIds) -> Tensor | None:
    """The nodes in a table of one column of ids; None if the table has other columns, or a flag for each node."""
    import pyarrow

    table = _read(path, header=False)
    if table.num_columns != 1 or pyarrow.types.is_nested(table.schema.types[0]):
        return None
    texts = _as_text(path, table.column_names[0], table.columns[0])
    flags = texts[int(path.suffix == ".csv" and len(texts) > len(ids)) :]  # below a header of any name
    if len(flags) == len(ids) and {text.lower() for text in flags.unique().to_pylist()} <= _FLAGS:
        return None
    return torch.from_numpy(_known(texts[int(_is_header(path, texts, ids)) :], ids, path))


def read_nodes(path: Path, ids: NodeIds) -> np.ndarray:
    """Whole numbers ``[B, columns]`` from a ``.csv`` file whose last column holds ids. An id that is the number -1, for
    a new node, stays -1.

    Raises:
        ValueError: an id is unknown, or another column holds something else than whole numbers.
    """
    *others, last = _texts(path)
    if _is_header(path, last, ids):
        others, last = [column[1:] for column in others], last[1:]
    new = _compute(path).equal(last, str(NEW)).to_numpy(zero_copy_only=False)
    rows = np.full(len(last), NEW, dtype=np.int64)
    rows[~new] = _known(last.filter(_mask(~new)), ids, path)
    try:
        numbers = [np.array(column.to_pylist(), dtype=np.int64) for column in others]
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path} holds something else than whole numbers before its ids: {error}") from error
    return np.column_stack([*numbers, rows])


def _is_header(path: Path, column: "pyarrow.Array", ids: NodeIds) -> bool:
    """Whether the first value of a column of ids is the name of the column: a usual one, and no node has it."""
    if path.suffix != ".csv" or not len(column) or ids.rows(column[:1])[0] >= 0:
        return False
    return column[0].as_py().lower() in (*COLUMNS, "node", "nodes", path.stem.lower())


def _known(names: "pyarrow.Array", ids: NodeIds, path: Path) -> np.ndarray:
    rows = ids.rows(names)
    if (rows < 0).any():
        unknown = names.filter(_mask(rows < 0))
        raise ValueError(f"{path} names {_listed(unknown)}, expected ids of nodes in {ids.source}")
    return rows


def _listed(names: Any) -> str:
    distinct = list(dict.fromkeys(str(name) for name in names))
    more = f" and {len(distinct) - _NAMED:,} more" if len(distinct) > _NAMED else ""
    return ", ".join(map(repr, distinct[:_NAMED])) + more


def column_names(path: Path) -> list[str]:
    """The names of the columns of a ``.parquet`` table, or the fields on the first line of a ``.csv``; else none.

    Raises:
        ValueError: the first line cannot be divided into fields.
    """
    if path.suffix == ".parquet":
        optional("pyarrow", "files", f"dataset: {path}", "or save the table as .npy")
        from pyarrow import parquet

        try:
            return parquet.read_schema(path).names
        except Exception:  # its reader tells what is wrong with the file
            return []
    if path.suffix != ".csv":
        return []
    line = _first_line(path).replace("\0", "\ufffd")  # zeros are of UTF-16, and an error of csv before Python 3.11
    try:
        return [name.strip() for name in next(csv.reader([line], delimiter=_separator(line)), [])]
    except csv.Error as error:
        raise ValueError(f"{path} is no table: {first_line_fault(line, error)}") from error


def _first_line(path: Path) -> str:
    with path.open("rb") as file:
        return file.readline(_LONGEST_LINE).removeprefix(codecs.BOM_UTF8).decode("utf-8", "replace").rstrip("\r\n")


def _separator(line: str) -> str:
    return "\t" if "\t" in line and "," not in line else ","  # ids may have blanks


def _texts(path: Path, *, header: bool = False) -> list["pyarrow.Array"]:
    """The columns of a table as text; all lines of a ``.csv`` without ``header``."""
    table = _read(path, header=header, lines_in_ids=path.name == FILE)
    return [_as_text(path, name, column) for name, column in zip(table.column_names, table.columns, strict=True)]


def _read(path: Path, *, texts: list[str] | None = None, header: bool, lines_in_ids: bool = False) -> "pyarrow.Table":
    """A table; columns of a ``.csv`` named in ``texts`` are text, by default all. ``header`` is about ``.csv`` only.

    Fields with line breaks (``lines_in_ids``) may be anywhere; without it, they must not be at the end of a block.
    """
    pyarrow = optional("pyarrow", "files", f"{path} with ids of nodes", "or number the nodes from 0")
    from pyarrow import csv as tables
    from pyarrow import parquet

    names = [] if path.suffix == ".parquet" else column_names(path)
    try:
        if path.suffix == ".parquet":
            return parquet.read_table(path)
        names = names if header else [f"column {i}" for i in range(len(names))]
        types = dict.fromkeys(names if texts is None else texts, pyarrow.string())
        return tables.read_csv(
            path,
            read_options=tables.ReadOptions(column_names=names, skip_rows=int(header)),
            parse_options=tables.ParseOptions(delimiter=_separator(_first_line(path)), newlines_in_values=lines_in_ids),
            convert_options=tables.ConvertOptions(column_types=types),
        )
    except Exception as error:  # a damaged file raises nearly anything
        raise ValueError(f"{path} is no table: {error}") from error


def _as_text(path: Path, name: str, column: "pyarrow.ChunkedArray") -> "pyarrow.Array":
    """A column of ids as text. Pandas makes whole numbers beside a missing one floating-point: they stay whole here."""
    import pyarrow
    from pyarrow import compute

    try:
        if pyarrow.types.is_floating(column.type):  # as text, 10000000.0 would be 1e+07
            if compute.any(compute.greater(compute.abs(column), MOST_EXACT)).as_py():
                raise pyarrow.ArrowInvalid("numbers beyond 2^53 are not exact")
            column = column.cast(pyarrow.int64())
        whole = column.cast(pyarrow.string()).combine_chunks()
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
        raise ValueError(
            f"{path} has the column {name!r} of {column.type}, expected ids, which are text or whole numbers: {error}"
        ) from error
    whole = pyarrow.concat_arrays(whole.chunks) if isinstance(whole, pyarrow.ChunkedArray) else whole
    return compute.utf8_trim_whitespace(whole)


def _filled(column: "pyarrow.ChunkedArray", number: float) -> "pyarrow.ChunkedArray":
    """A column with ``number`` in its empty fields; unchanged if it does not hold numbers."""
    import pyarrow

    types = pyarrow.types
    kinds = (types.is_integer, types.is_floating, types.is_boolean, types.is_null)  # is_null: no field has a value
    if not any(fits(column.type) for fits in kinds):
        return column
    return column.cast(pyarrow.float64()).fill_null(number)


def _mask(flags: np.ndarray) -> "pyarrow.Array":
    import pyarrow

    return pyarrow.array(flags)


def _compute(path: Path) -> Any:
    optional("pyarrow", "files", f"{path} with ids of nodes", "or number the nodes from 0")
    from pyarrow import compute

    return compute

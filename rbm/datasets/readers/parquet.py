"""Numbers in columns of pyarrow tables, and checks: an index instead of data, columns not in numerical order."""

import itertools
import re
from typing import Any

import numpy as np


class TextColumnError(ValueError):
    """A column of a table holds something else than numbers.

    Args:
        column: name of the column.
    """

    def __init__(self, column: str) -> None:
        super().__init__(f"its column {column!r} holds no numbers")
        self.column = column


def numbers(table: Any) -> np.ndarray:
    """The numbers ``[rows, columns]`` of a table; a list of numbers counts as that many columns.

    Args:
        table: a ``pyarrow.Table`` or ``RecordBatch`` with at least one column. An empty field becomes NaN.

    Raises:
        TextColumnError: a column does not hold numbers.
        ValueError: a row has no list, or a column has lists of unlike length.
    """
    columns = []
    for name, column in zip(table.schema.names, table.columns, strict=True):
        values = column.to_numpy(zero_copy_only=False)
        if is_list(column.type):
            if column.null_count:
                raise ValueError(f"its column {name!r} lacks the list of a row; fill it in, or drop the row")
            try:
                values = np.stack(values) if len(values) else np.empty((0, 0))
            except ValueError as error:
                raise ValueError(f"its column {name!r} has lists of unlike length: {error}") from error
        if values.dtype.kind not in "biuf":
            raise TextColumnError(name)
        columns.append(values)
    return np.column_stack(columns)


def is_list(kind: Any) -> bool:
    """Whether a column of the ``pyarrow.DataType`` ``kind`` has a list of values in each row."""
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def check_columns(schema: Any) -> None:
    """Raise ValueError if a column is an index, or if numbered columns are not in numerical order.

    An index would be read as an additional feature or label. Pandas writes the index of a table that was sorted,
    sampled, filtered or given row names, and records this in the file's metadata. A copy made by another program may
    lack the metadata, but keeps the name that pandas gives an unnamed index. Columns are read in file order; columns
    numbered from 0 or 1 whose names were sorted as text come as 1, 10, 11, 2.

    Args:
        schema: a ``pyarrow.Schema``.
    """
    described = (schema.pandas_metadata or {}).get("index_columns", [])
    for name in schema.names:
        if name in described or re.fullmatch(r"__index_level_\d+__", name):
            raise ValueError(
                f"its column {name!r} is an index of rows, as pandas writes it: write the table with index=False, or"
                " after reset_index() and under another name where it is data"
            )
    numbered = zip(_numbers(schema.names), schema.names, strict=False)
    for (number, name), (following, other) in itertools.pairwise(numbered):
        if following < number:
            raise ValueError(
                f"its column {other!r} comes after {name!r}, expected numbered columns in the order of their numbers:"
                " write them so, or under names without numbers where this order is meant"
            )


def _numbers(names: list[str]) -> list[int]:
    """The numbers of columns such as f0, f1, f2, in any order and from 0 or 1 on; empty if any has another name."""
    found = [re.fullmatch(r"(\D*)(\d+)", name, re.ASCII) for name in names]
    if not all(found) or len({match[1] for match in found}) != 1:
        return []
    numbers = [int(match[2]) for match in found]
    return numbers if sorted(numbers) in ([*range(len(names))], [*range(1, len(names) + 1)]) else []

"""Columns of a Parquet table that are no numbers of its rows, or do not stand in their order."""

import itertools
import re
from typing import Any


def check_columns(schema: Any) -> None:
    """Raise ValueError where a column of a table is its index, or numbered columns stand in another order.

    An index would be read as one feature or label more. Pandas writes that of a table that was sorted, sampled,
    filtered or given names of rows, and says so in the file. What other programs copied of it keeps the name that
    pandas gives an index without one. Columns are read as they stand, and those numbered from 0 or 1 whose names were
    sorted as text stand as 1, 10, 11, 2.

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
    """Those of columns such as f0, f1, f2, in any order and from 0 or 1 on; none where they are not all such."""
    found = [re.fullmatch(r"(\D*)(\d+)", name, re.ASCII) for name in names]
    if not all(found) or len({match[1] for match in found}) != 1:
        return []
    numbers = [int(match[2]) for match in found]
    return numbers if sorted(numbers) in ([*range(len(names))], [*range(1, len(names) + 1)]) else []

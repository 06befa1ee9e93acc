"""Parse request bodies, JSON or ``.npy``, into rows; each mistake is reported in one sentence.

Accepted rows contain only finite float32 numbers. Refused rows never share a batch with the rows of other clients.
"""

import io
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from pydantic_core import from_json
from torch import Tensor

from rbm.serving.neighbors import neighbor_encodings
from rbm.serving.server.limits import Limits
from rbm.serving.server.student import ServedStudent

_NPY = b"\x93NUMPY"
_NPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_LISTS_A_ROW = 3  # of indices, values and neighbors
_NONE_GIVEN = object()  # distinct from an explicit null
_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "a boolean",
    str: "a string",
    list: "a list",
    dict: "an object",
}


class RefusedError(Exception):
    """A request that gets no predictions.

    Args:
        status: status of the response.
        message: one sentence.
        retry_after: seconds after which the client may try again, or None.
    """

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


def decode(body: bytes | bytearray, served: ServedStudent, limits: Limits) -> Tensor:
    """Decode a request body into float32 rows ``[B, in_channels]``.

    The body is a ``.npy`` of rows, or a JSON object with rows either as ``x``, a list of lists, or as ``indices`` and
    ``values`` of the nonzero entries. With ``neighbors``, the rows have no columns for encodings.

    Raises:
        RefusedError: 400 if the body is anything else, 413 if it has too many rows.
    """
    if body.startswith(_NPY):
        rows, neighbors = _npy(body, served), _NONE_GIVEN
        _check_count(len(rows), rows.shape[1], limits)
    else:
        rows, neighbors = _json(body, served, limits)
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if bad.size:
        raise RefusedError(400, f"row {bad[0]} holds NaN, infinity or a number beyond 3.4e38, expected finite float32")
    tensor = torch.from_numpy(rows)
    if neighbors is _NONE_GIVEN:
        return tensor
    return torch.cat([tensor, _joined(neighbors, len(rows), served).to(tensor)], dim=1)


def _json(body: bytes | bytearray, served: ServedStudent, limits: Limits) -> tuple[np.ndarray, Any]:
    # Checked before parsing: a list takes much more memory than the text "[],", and slows down garbage collection.
    if body.count(b"[") + body.count(b"{") > 1 + _LISTS_A_ROW * (limits.rows + 1):
        raise RefusedError(413, f"the body has lists for more than {limits.rows} rows, the most of one request")
    try:
        content = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        # Python's json writes these for what is not finite; the parser only says where it expects a value.
        hint = ", which has no NaN and no Infinity" if b"NaN" in body or b"Infinity" in body else ""
        message = f"the body is neither JSON ({error}{hint}) nor a .npy file; expected {_expected(served)}"
        raise RefusedError(400, message) from None
    if type(content) is not dict:
        raise RefusedError(400, f"the body holds {_named(content)}, expected {_expected(served)}")
    neighbors = content.pop("neighbors", _NONE_GIVEN)
    if neighbors is not _NONE_GIVEN and served.encodings is None:
        raise RefusedError(400, f"got 'neighbors', but rows of this student are {served.meaning}; leave it out")
    width = served.in_channels if neighbors is _NONE_GIVEN else served.features
    if content.keys() == {"x"}:
        return _dense(content["x"], width, served, limits), neighbors
    if content.keys() == {"indices", "values"}:
        return _sparse(content["indices"], content["values"], width, limits), neighbors
    got = ", ".join(map(repr, content))[:200] or "nothing"
    raise RefusedError(400, f"the body holds {got}, expected {_expected(served)}")


def _expected(served: ServedStudent) -> str:
    return (
        f'an object {{"x": [[...], ...]}} with rows of {served.meaning}; or'
        ' {"indices": [[...], ...], "values": [[...], ...]} with what is not zero'
    )


def _dense(x: Any, width: int, served: ServedStudent, limits: Limits) -> np.ndarray:
    _check_count(len(_list(x, "'x'")), width, limits)
    for i, row in enumerate(x):
        if len(_list(row, f"row {i} of 'x'")) != width:
            hint = f": {served.meaning}" if width > served.features else " features"
            raise RefusedError(400, f"row {i} of 'x' holds {len(row)} numbers, expected {width}{hint}")
        _check_types(row, {int, float}, f"row {i} of 'x'")
    return _float32(x, "'x'").reshape(len(x), width)


def _sparse(indices: Any, values: Any, width: int, limits: Limits) -> np.ndarray:
    rows, columns = _pairs(indices, width, "'indices'", "the columns of a row")
    count = len(indices)
    _check_count(count, width, limits)
    if len(_list(values, "'values'")) != count:
        raise RefusedError(400, f"'values' holds {len(values)} rows, expected {count}, as 'indices' does")
    for i, (row, own) in enumerate(zip(values, indices, strict=True)):
        if len(_list(row, f"row {i} of 'values'")) != len(own):
            raise RefusedError(400, f"row {i} of 'values' holds {len(row)} numbers, expected {len(own)}, as 'indices'")
        _check_types(row, {int, float}, f"row {i} of 'values'")
    cells = rows * width + columns
    if len(np.unique(cells)) < len(cells):
        raise RefusedError(400, "'indices' names a column of a row twice; add its values up")
    found = np.zeros((count, width), np.float32)
    found.flat[cells] = _float32(list(itertools.chain.from_iterable(values)), "'values'")
    return found


def _joined(neighbors: Any, count: int, served: ServedStudent) -> Tensor:
    nodes = len(served.encodings)
    rows, joined = _pairs(neighbors, nodes, "'neighbors'", "the training graph's nodes")
    if len(neighbors) != count:
        raise RefusedError(400, f"'neighbors' holds {len(neighbors)} lists, expected {count}, one for each row")
    return neighbor_encodings(served.passed_on, rows, joined, count)


def _pairs(lists: Any, stop: int, name: str, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Flatten a list of lists of whole numbers: the index of each number's list, and the number; int64 ``[M]`` each."""
    for i, row in enumerate(_list(lists, name)):
        _check_types(_list(row, f"row {i} of {name}"), {int}, f"row {i} of {name}")
        if row and not 0 <= min(row) <= max(row) < stop:
            bad = str(min(row) if min(row) < 0 else max(row))[:40]
            raise RefusedError(400, f"row {i} of {name} names {bad}, expected 0 to {stop - 1}, {what}")
    rows = np.repeat(np.arange(len(lists)), [len(row) for row in lists])
    return rows, np.fromiter(itertools.chain.from_iterable(lists), np.int64, len(rows))


def _npy(body: bytes | bytearray, served: ServedStudent) -> np.ndarray:
    file = io.BytesIO(body)
    try:
        shape, by_columns, dtype = _NPY_HEADERS[np.lib.format.read_magic(file)](file)
    except Exception as error:  # the header is a Python literal, which may raise nearly anything
        raise RefusedError(400, f"the body is a .npy file whose header cannot be read ({str(error)[:200]})") from None
    data = memoryview(body)[file.tell() :]
    counts = all(type(size) is int and size >= 0 for size in shape)  # (True, 8) is a shape for the parser
    if dtype.kind not in "iuf" or not counts or len(shape) != 2 or shape[1] != served.in_channels:
        got = f"{dtype} of shape {list(shape)}"[:200]
        raise RefusedError(
            400, f"the .npy file holds {got}, expected numbers [B, {served.in_channels}]: {served.meaning}"
        )
    # Checked before an array is made: the header may claim any size.
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise RefusedError(400, f"the .npy file has {len(data)} bytes of numbers, which does not match its header")
    rows = np.frombuffer(data, dtype).reshape(shape, order="F" if by_columns else "C")
    with np.errstate(over="ignore"):  # numbers beyond float32 become infinite and are refused
        return np.array(rows, np.float32, order="C")


def _float32(numbers: Sequence, name: str) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):
            return np.array(numbers, np.float32)
    except OverflowError:
        raise RefusedError(400, f"{name} holds a whole number beyond 3.4e38, expected finite float32") from None


def _list(value: Any, name: str) -> list:
    if type(value) is not list:
        raise RefusedError(400, f"{name} is {_named(value)}, expected a list")
    return value


def _check_types(row: list, wanted: set[type], name: str) -> None:
    # Exact types: True is an int in Python, and NumPy reads a number from a string.
    if other := set(map(type, row)) - wanted:
        expected = "numbers" if float in wanted else "whole numbers"
        raise RefusedError(400, f"{name} holds {_NAMES.get(other.pop(), 'null')}, expected {expected}")


def _check_count(count: int, width: int, limits: Limits) -> None:
    most = min(limits.rows, limits.row_bytes // (4 * width))
    if count > most:
        raise RefusedError(413, f"got {count} rows of {width} numbers, expected at most {most} in one request")


def _named(value: Any) -> str:
    return _NAMES.get(type(value), "null")

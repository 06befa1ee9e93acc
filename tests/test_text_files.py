"""Text files are read and written as UTF-8: without ``encoding``, Python takes that of the locale, such as Latin-1."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("rbm", "rbm_kernels", "benchmarks", "experiments", "examples", "docs", "ptx_executor")


def texts_of(call: ast.Call, kind: str) -> list[str]:
    """The arguments that are constants and look like a mode of ``open`` that fits the pattern ``kind``."""
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    constants = [value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return [text for text in constants if re.fullmatch(kind, text)]


def is_in_the_encoding_of_the_locale(call: ast.Call) -> bool:
    if any(keyword.arg in ("encoding", None) for keyword in call.keywords):
        return False
    if isinstance(call.func, ast.Name):
        return call.func.id == "open" and not texts_of(call, "[rwaxt+]*b[b+]*")
    match call.func:
        case ast.Attribute(attr="read_text"):
            return not call.args
        case ast.Attribute(attr="write_text"):
            return len(call.args) == 1
        case ast.Attribute(attr="open"):
            return bool(texts_of(call, "[rwaxt+]+")) or not call.args
    return False


def found_in(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and is_in_the_encoding_of_the_locale(node):
            yield ast.unparse(node)


def test_every_text_file_is_utf8():
    files = [ROOT / "setup.py", *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))]
    assert len(files) > 200
    found = {file: calls for file in files if (calls := [*found_in(file.read_text(encoding="utf-8"))])}
    assert found == {}


def test_calls_are_told_apart():
    bad = ["path.read_text()", "path.write_text(text)", "open(path)", "open(path, 'w')", "path.open('a', newline='')"]
    good = ["read_text(path)", "path.read_text('utf-8')", "open(path, 'rb')", "archive.open(entry)", "path.open('rb')"]
    assert [*found_in("\n".join(bad))] == bad
    assert [*found_in("\n".join([*good, "open(path, encoding='utf-8')"]))] == []

"""PTX text -> kernels: parameters, shared arrays, labels and statements, each with its line and its source.

The grammar is that of PTX ISA 4 (syntax) and 5 (state spaces, types), as far as current compilers use it: a statement
ends at its semicolon, braces open a scope, ``.loc`` gives the source line of the statements that follow.
"""

import re
from dataclasses import dataclass, field

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{;]*)\{", re.DOTALL)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)?\.align\s+\d+\s+)?([\w$]+)(?:\[(\d+)\])?"
)
_SHARED = re.compile(r"(?:(\.extern)\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?\s*;")
_PIECE = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_LABEL = re.compile(r"([\w$.]+)\s*:(?!:)")
_STATEMENT = re.compile(r"(?:@(!?)(%[\w$.]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_REGISTERS = re.compile(r"\.reg\s+\.\w+\s+(.*)", re.DOTALL)
_NAME = re.compile(r"(?<![%\w$.])[A-Za-z_$][\w$]*")
_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


@dataclass(frozen=True)
class Operand:
    """Registers, symbols or constants, named as in the text: one, or those of a vector; an address adds an offset."""

    names: tuple[str, ...]
    offset: int = 0


@dataclass(frozen=True)
class Statement:
    """One instruction. ``guard``: the predicate, and whether it is negated; ``source``: file and line, if known."""

    line: int
    name: str
    operands: tuple[Operand, ...]
    guard: tuple[str, bool] | None
    source: tuple[str, int] | None
    text: str


@dataclass
class Kernel:
    """One ``.entry``. ``parameters``: name -> (offset, bytes); ``shared``: name -> (bytes, alignment), in order."""

    name: str
    parameters: dict[str, tuple[int, int]]
    shared: dict[str, tuple[int, int]]
    dynamic_shared: str | None
    statements: list[Statement] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parse(text: str) -> dict[str, Kernel]:
    """Every kernel of a module, by name.

    Raises:
        ValueError: a statement cannot be parsed; the message contains its line.
    """
    files = {int(number): path for number, path in _FILE.findall(text)}
    # Comments become blanks, so that positions and lines stay the same.
    text = _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    kernels = {}
    ends = [0]
    for entry in _ENTRY.finditer(text):
        end = _closing_brace(text, entry.end())
        before, body = text[ends[-1] : entry.start()], text[entry.end() : end]
        shared, dynamic = _shared(before + body)
        kernel = Kernel(entry[1], _parameters(entry[2]), shared, dynamic)
        _read_body(kernel, body, 1 + text.count("\n", 0, entry.end()), files)
        kernels[kernel.name] = kernel
        ends.append(end)
    return kernels


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"line {1 + text.count(chr(10), 0, start)}: the kernel that begins here has no end")


def _parameters(text: str) -> dict[str, tuple[int, int]]:
    found, offset = {}, 0
    for alignment, kind, name, count in _PARAMETER.findall(text):
        size = _BYTES[kind[1:]]
        offset = -(-offset // int(alignment or size)) * int(alignment or size)
        found[name] = (offset, size * int(count or 1))
        offset += found[name][1]
    return found


def _shared(text: str) -> tuple[dict[str, tuple[int, int]], str | None]:
    arrays, dynamic = {}, None
    for extern, alignment, kind, name, count in _SHARED.findall(text):
        size = _BYTES[kind[1:]]
        if extern:
            dynamic = name
        else:
            arrays[name] = (size * int(count or 1), int(alignment or size))
    return arrays, dynamic


def _read_body(kernel: Kernel, body: str, line: int, files: dict[int, str]) -> None:
    place, source = 0, None
    unmarked: dict[str, str] = {}  # registers declared without a percent sign (inline assembly), and their new names
    while True:
        blank = re.compile(r"\s*").match(body, place)
        line += blank[0].count("\n")
        place = blank.end()
        if place == len(body):
            return
        if body[place] in "{}":
            place += 1
        elif label := _LABEL.match(body, place):
            kernel.labels[label[1]] = len(kernel.statements)
            place = label.end()
        elif body.startswith((".loc", ".file"), place):
            # These directives end at the end of their line.
            end = body.find("\n", place)
            numbers = re.match(r"\.loc\s+(\d+)\s+(\d+)", body[place:end])
            if numbers:
                source = (files.get(int(numbers[1]), "?"), int(numbers[2]))
            place = end
        else:
            end = body.find(";", place)
            if end < 0:
                raise ValueError(f"line {line}: no semicolon ends {body[place:].strip()[:80]!r}")
            text = body[place:end]
            if declared := _REGISTERS.fullmatch(text):
                for name in _NAME.findall(declared[1]):
                    unmarked.setdefault(name, f"%temp{len(unmarked)}")
            elif not text.startswith("."):
                marked = _NAME.sub(lambda match: unmarked.get(match[0], match[0]), text)
                kernel.statements.append(_statement(" ".join(marked.split()), line, source))
            line += text.count("\n")
            place = end + 1


def _statement(text: str, line: int, source: tuple[str, int] | None) -> Statement:
    match = _STATEMENT.fullmatch(text)
    if match is None:
        raise ValueError(f"line {line}: this is no statement: {text!r}")
    negated, guard, name, operands = match.groups()
    read = tuple(_operand(piece.strip(), line) for piece in _PIECE.findall(operands))
    return Statement(line, name, read, (guard, negated == "!") if guard else None, source, text)


def _operand(text: str, line: int) -> Operand:
    if text.startswith("{"):
        return Operand(tuple(name.strip() for name in text[1:-1].split(",")))
    if text.startswith("["):
        base, plus, offset = text[1:-1].replace(" ", "").partition("+")
        return Operand((base,), int(offset, 0) if plus else 0)
    if text.startswith("!"):
        raise ValueError(f"line {line}: a negated operand is not known: {text}")
    return Operand(tuple(text.split("|")))

"""Docstrings are written for ``help()`` and Sphinx's roles; the site's pages are Markdown.

Sections of the configuration get a table of their settings, which are attributes without docstrings. Defaults that are
named constants, such as ``NUM_EXPERTS``, are shown as their values.
"""

import re
from importlib import import_module

from griffe import Class, Extension, Function, Object

from rbm.config import as_text
from rbm.config.section import Section, settings_of

# :class:`~rbm.nn.rbm_layer.Routing` is `Routing`, :func:`rbm.distill` is `rbm.distill`.
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`(?:~[\w.]*\.(?=\w+`))?([^`]+)`")
_MATH = re.compile(r":math:`([^`]+)`")
_TABLE = re.compile(r"(?m)^( *)=+ +=+[= ]*\n(?:.+\n)+\1=+ +=+[= ]*$")
_LITERAL = re.compile(r"(?m)::$")
_CONSTANT = re.compile(r"[A-Z][A-Z_]+")


class Docstrings(Extension):
    """Bring roles, formulas and tables into Markdown, and add settings and defaults."""

    def on_object(self, *, obj: Object, **_) -> None:
        """Of one module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_class(self, *, cls: Class, **_) -> None:
        """Of one class."""
        if cls.docstring is not None and cls.path.startswith("rbm.config."):
            kind = getattr(import_module(cls.module.path), cls.name)
            if issubclass(kind, Section) and kind is not Section:
                cls.docstring.value += f"\n\n{settings_table(kind)}"

    def on_function(self, *, func: Function, **_) -> None:
        """Of one function or method."""
        for parameter in func.parameters:
            if _CONSTANT.fullmatch(str(parameter.default)):
                parameter.default = repr(getattr(import_module(func.module.path), str(parameter.default)))


def settings_table(section: type[Section]) -> str:
    """Every setting of a section, with the values that it takes and its default."""
    rows = [f"| `{name}` | {values} | {_default(default)} |" for name, values, default in settings_of(section)]
    return "\n".join(["| setting | values | default |", "|---|---|---|", *rows])


def _default(value: object) -> str:
    return "" if value == "" else f"`{as_text(value)}`"


def markdown(text: str) -> str:
    """A docstring in Markdown."""
    text = _MATH.sub(r"$\1$", _ROLE.sub(r"`\1`", text))
    text = _TABLE.sub(_table, text)
    return _LITERAL.sub(":", text)


def _table(match: re.Match) -> str:
    """A simple table of reStructuredText: lines of ``=`` say where its columns begin."""
    indent, lines = match[1], match[0].splitlines()
    starts = [part.start() for part in re.finditer(r"=+", lines[0])]
    rules = [i for i, line in enumerate(lines) if re.fullmatch(r"[= ]+", line)]
    rows: list[list[str]] = [] if len(rules) == 3 else [[""] * len(starts)]  # two rules: no line is a heading
    for i, line in enumerate(lines):
        if i in rules:
            continue
        cells = [line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
        if cells[0] or not rows:
            rows.append(cells)
        else:  # cells that go on in the next line
            rows[-1] = [f"{old} {new}".strip() for old, new in zip(rows[-1], cells, strict=True)]
    rows.insert(1, ["---"] * len(starts))
    return "\n".join(f"{indent}| {' | '.join(row)} |" for row in rows)

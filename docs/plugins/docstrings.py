"""Docstrings are written for ``help()`` and Sphinx's roles; the site's pages are Markdown."""

import re

from griffe import Extension, Object

# :class:`~rbm.nn.rbm_layer.Routing` is `Routing`, :func:`rbm.distill` is `rbm.distill`.
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`(?:~[\w.]*\.(?=\w+`))?([^`]+)`")
_MATH = re.compile(r":math:`([^`]+)`")
_TABLE = re.compile(r"(?m)^( *)=+ +=+[= ]*\n(?:.+\n)+\1=+ +=+[= ]*$")
_LITERAL = re.compile(r"(?m)::$")


class Docstrings(Extension):
    """Bring roles, formulas and tables into Markdown."""

    def on_object(self, *, obj: Object, **_) -> None:
        """Of one module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


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

"""What MkDocs does here beyond its own: pages that stand elsewhere in the tree, the page of the command line, formulas
as MathML, and a search that works without a server.

MathML is what browsers draw by themselves: no script draws it, so none has to be fetched.
"""

import posixpath
import re
import tempfile
from html import unescape
from pathlib import Path

import typer.cli
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent.parent
# Page of the site -> the file that it is.
ELSEWHERE = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "performance/summary.md": "benchmarks/NOTES.md",
    **{f"performance/{path.name}": f"benchmarks/notes/{path.name}" for path in ROOT.glob("benchmarks/notes/*.md")},
    **{
        f"operators/{path.parent.name}.md": f"rbm_kernels/ops/{path.parent.name}/README.md"
        for path in ROOT.glob("rbm_kernels/ops/*/README.md")
    },
}
# Pictures that stand beside their data.
PICTURES = ("benchmarks/results/large_graph.png",)
_LINK = re.compile(r"\[([^\]]+)\]\(([^):]+)\)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand elsewhere, the page of the command line, and the pictures."""
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "command-line.md", content=_command_line()))
    for picture in PICTURES:
        files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))
    return files


def on_page_markdown(markdown: str, page: Page, **_) -> str:
    """Links are written as in the tree. One to a page or a picture of the site leads there; one to another file becomes
    the file's name.
    """
    here = page.file.src_uri
    source = ROOT / ELSEWHERE.get(here, f"docs/{here}")

    def link(match: re.Match) -> str:
        path, mark, part = match[2].partition("#")
        target = (source.parent / path).resolve()
        if not path or not target.exists():  # within the page, or no link: code may have the same form
            return match[0]
        found = _place(target)
        if found is None:
            return _named(match[1], f"{target.relative_to(ROOT)}{mark}{part}")
        return f"[{match[1]}]({posixpath.relpath(found, posixpath.dirname(here) or '.')}{mark}{part})"

    return _LINK.sub(link, markdown)


def _place(target: Path) -> str | None:
    """Where the site has a file of the tree; None if it does not have it."""
    name = target.relative_to(ROOT).as_posix()
    for page, source in ELSEWHERE.items():
        if name == source:
            return page
    return name if name in PICTURES else name.removeprefix("docs/") if name.startswith("docs/") else None


def _named(text: str, file: str) -> str:
    """A link to a file that is no page, without the link; its text may be the file's name already."""
    return f"`{file}`" if text.strip("`") in (file, Path(file).name) else f"{text} (`{file}`)"


def _command_line() -> str:
    """Every command with its options, as ``typer rbm.cli utils docs`` writes them; its list of commands cuts what they
    do after 45 letters, and has the whole sentence here.
    """
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.md"
        asked = ["rbm.cli", "utils", "docs", "--name", "rbm", "--title", "Command line", "--output", str(page)]
        done = CliRunner().invoke(typer.cli.app, asked)
        if done.exit_code:
            raise RuntimeError(f"the page of the command line was not written: {done.output}")
        text = page.read_text(encoding="utf-8").replace("```console", "```sh")
    summaries = dict(re.findall(r"(?m)^## `rbm (\w+)`\n\n(.+)$", text))
    return re.sub(r"(?m)^\* `(\w+)`: .*$", lambda item: f"* `{item[1]}`: {summaries[item[1]]}", text)


def on_page_content(html: str, **_) -> str:
    """Formulas, which arithmatex has marked, as MathML."""

    def formula(match: re.Match) -> str:
        display = "block" if match[2] == "[" else "inline"
        drawn = convert(unescape(match[3]).strip(), display=display)
        return f'<div class="formula">{drawn}</div>' if display == "block" else drawn

    return _FORMULA.sub(formula, html)


def on_post_build(config: MkDocsConfig) -> None:
    """The index of the search as a script too, which a page that was opened from a folder may load."""
    folder = Path(config.site_dir) / "search"
    index = (folder / "search_index.json").read_text(encoding="utf-8")
    (folder / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")

"""``report.html`` and ``report.json``: written into a run folder at the end of a run, and again by ``rbm report``."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from rbm.distillation.report import OBSERVED, REPORT, compare, page
from rbm.distillation.report.observe import observe
from rbm.distillation.report.run_data import RunData
from rbm.distillation.result import Distillation
from rbm.training.run_files import list_file
from rbm.utils.files import as_path, write_json, write_text

_OPTION = re.compile(r"(--[a-z][a-z-]*)")


def write_report(result: Distillation, folder: Path | str) -> Path:
    """Write ``report.json``, what is seen of a run's models, and ``report.html``, the page that is made of it.

    Args:
        result: of the run.
        folder: its run folder, which is complete but for these files.

    Returns:
        The page.
    """
    write_observed(result, folder)
    return write_page([folder], as_path("folder", folder) / REPORT)


def write_observed(result: Distillation, folder: Path | str) -> None:
    """Write ``report.json`` alone."""
    path = as_path("folder", folder) / OBSERVED
    list_file(path)
    write_json(path, observe(result))


def write_page(folders: Sequence[Path | str], out: Path | str) -> Path:
    """Write the page of one run, or of several side by side, from the files of their folders.

    Args:
        folders: of finished runs, each with a ``report.json``.
        out: the page. Its folder exists.

    Raises:
        ValueError: no folder, one twice, or a damaged file.
        FileNotFoundError: a file of a run is missing.
    """
    folders, out = [as_path("run", folder) for folder in folders], as_path("out", out)
    if not folders:
        raise ValueError("runs: got none, expected one or more run folders")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"runs: got {', '.join(map(str, folders))}, expected each once")
    text = render(folders)
    list_file(out)
    write_text(out, text)
    return out


def render(folders: Sequence[Path]) -> str:
    """The page of :func:`write_page`."""
    runs = [RunData(folder, f"run{number}") for number, folder in enumerate(folders, 1)]
    shown: list[dict[str, Any]] = [
        {
            "key": run.key,
            "name": name,
            "title": run.name,
            "about": _about(run.summary),
            "headline": page.headline(run),
            "tiles": page.tiles(run),
            "verdict": page.verdict(run),
            "sections": page.sections(run),
        }
        for name, run in zip(compare.names(runs), runs, strict=True)
    ]
    together = None
    if len(runs) > 1:
        together = {"headline": compare.headline(runs), "sections": compare.sections(runs)}
    return _environment().get_template("page.html").render(runs=shown, together=together)


def _about(summary: dict[str, Any]) -> str:
    return f"{summary['teacher']['name']} teacher, preset {summary['preset']}, seed {summary['seed']}"


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rbm.distillation.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["picture"] = Markup  # of Matplotlib, whose texts it has escaped
    environment.filters["options"] = _options
    return environment


def _options(text: str) -> Markup:
    """A sentence whose options of a command (``--keep``) are set as code, which no line break cuts."""
    parts = _OPTION.split(text)
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))

"""``rbm report``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from rbm.cli.options import console, status
from rbm.utils.console import print_line


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders; several are compared on one page.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Page to write (default: report.html in RUN, or in the current folder for several)."),
    ] = None,
    root: Annotated[
        str | None, typer.Option(help="Folder with the datasets' raw files, for runs without a report.json.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing page.")] = False,
    tsne: Annotated[
        bool, typer.Option("--tsne", help="Also draw representation.png in each RUN: t-SNE of the router's inputs.")
    ] = False,
) -> None:
    """Write an HTML report on one or more runs: verdict, accuracy, calibration, experts and speed.

    The page works offline. rbm distill writes one for each run.

    For a run without a report.json, the graph is loaded and the models are run again.
    """
    from rbm.distillation.report import OBSERVED, REPORT
    from rbm.distillation.report.finished import read_distillation
    from rbm.distillation.report.pictures import write_representation
    from rbm.distillation.report.write import write_observed, write_page
    from rbm.nn.saved_student import check_exists
    from rbm.utils.files import check_ending, check_writable

    for run in runs:
        check_exists(run)
    page = out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    page = check_ending("report", page, (".html",))
    if not page.parent.is_dir():
        raise FileNotFoundError(f"report {page}: folder {page.parent} does not exist; make it, or name another page")
    is_own_report = len(runs) == 1 and page == runs[0] / REPORT
    if page.exists() and not (overwrite or is_own_report):
        raise FileExistsError(f"report {page} exists; use --overwrite to replace it, or another --out")
    check_writable(f"report {page}", page.parent)
    again = [run for run in runs if tsne or not (run / OBSERVED).is_file()]
    for run in again:
        check_writable(f"run: {run}", run, "report a copy of it, or allow it")
    for run in again:
        with status.status(Text(f"{run}: its models run again")):
            result = read_distillation(run, root)
            if not (run / OBSERVED).is_file():
                write_observed(result, run)
            if tsne:
                write_representation(result, run)
    with status.status("charts"):
        write_page(runs, page)
    print_line(console, f"{page}: {page.stat().st_size / 2**10:,.0f} KiB")

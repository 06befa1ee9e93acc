"""``rbm report``."""

from pathlib import Path
from typing import Annotated

import typer

from rbm.cli.options import console, status


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several are set side by side.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Page to write (default: report.html in RUN; of several runs, here).")
    ] = None,
    root: Annotated[
        str | None, typer.Option(help="Folder of the datasets' raw files, for runs without a report.json.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the page of several runs.")] = False,
    tsne: Annotated[
        bool, typer.Option("--tsne", help="Also draw representation.png in each RUN: t-SNE of what the router sees.")
    ] = False,
) -> None:
    """Write a page on runs: verdict, accuracy, calibration, experts, speed; it opens in a browser, without a network.

    Each run of rbm distill ends with its own. Where a run has none, its graph is loaded and its models are asked again.
    """
    from rbm.distillation.report import REPORT
    from rbm.distillation.report.finished import read_distillation
    from rbm.distillation.report.pictures import write_representation
    from rbm.distillation.report.run_data import OBSERVED
    from rbm.distillation.report.write import write_observed, write_page
    from rbm.utils.files import check_ending

    page = out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    page = check_ending("report", page, (".html",))
    if not page.parent.is_dir():
        raise FileNotFoundError(f"report {page}: folder {page.parent} does not exist; make it, or name another page")
    is_of_run = len(runs) == 1 and page == runs[0] / REPORT
    if page.exists() and not (overwrite or is_of_run):
        raise FileExistsError(f"report {page} exists; use --overwrite to replace it, or another --out")
    for run in runs:
        if tsne or not (run / OBSERVED).is_file():
            with status.status(f"{run}: its models are asked again"):
                result = read_distillation(run, root)
                if not (run / OBSERVED).is_file():
                    write_observed(result, run)
                if tsne:
                    write_representation(result, run)
    with status.status("charts"):
        write_page(runs, page)
    console.print(f"{page}: {page.stat().st_size / 2**10:,.0f} KiB", highlight=False, soft_wrap=True)

"""The command line. ``rbm --help`` lists the commands; related commands share a module of this package."""

import io
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from rbm.cli.distillation import distill
from rbm.cli.errors import one_sentence
from rbm.cli.experiments import experiment, reproduce, table
from rbm.cli.options import console
from rbm.cli.report import report
from rbm.cli.serving import export, latency, predict, serve
from rbm.cli.tuning import tune

_OF_SCRIPTED_CLASS = "`torch.jit.script` is deprecated"

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


def _version(requested: bool) -> None:
    if requested:
        from rbm_kernels import __version__

        console.print(f"rbm {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
@one_sentence
def common(
    plugin: Annotated[
        list[Path] | None, typer.Option(help="Python file that adds a method, teacher or dataset; repeatable.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Distil a graph neural network into a Routing-by-Memory student that predicts without the graph."""
    from rbm.utils.plugins import load_plugin

    for path in plugin or []:
        load_plugin(path)


def info() -> None:
    """Show the build, the installed versions, the devices, and the implementation used for each operator."""
    from rbm.cli.info import tables

    for shown in tables():
        console.print(shown)


for _command in (distill, experiment, reproduce, table, tune, report, predict, export, latency, serve, info):
    app.command()(one_sentence(_command))


def main() -> None:
    """Entry point of the program ``rbm``."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that its encoding lacks, such as "±", become "?"
        sys.stdout.reconfigure(errors="replace")
    # PyTorch Geometric scripts a class of its own when it is imported, of which PyTorch 2.14 and newer warn. The
    # variable is for worker processes.
    warnings.filterwarnings("ignore", message=_OF_SCRIPTED_CLASS, category=FutureWarning)
    kept = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [f"ignore:{_OF_SCRIPTED_CLASS}:FutureWarning", kept]))
    app()

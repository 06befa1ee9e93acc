"""The command line; ``rbm --help`` lists its commands, a file each here or a few that belong together."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from rbm.cli.distillation import distill
from rbm.cli.experiments import experiment, reproduce, table
from rbm.cli.options import console, status
from rbm.cli.serving import export, latency, predict, serve
from rbm.cli.tuning import tune

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def common(
    plugin: Annotated[
        list[Path] | None, typer.Option(help="Python file with a method, teacher or dataset of your own; repeatable.")
    ] = None,
) -> None:
    """Distil a graph neural network into a Routing-by-Memory student that needs no graph."""
    from rbm.utils.plugins import load_plugin

    for path in plugin or []:
        load_plugin(path)


def info() -> None:
    """Tell what was built, what is installed, and which implementation serves each operator."""
    from rbm.cli.info import tables

    for shown in tables():
        console.print(shown)


for _command in (distill, experiment, reproduce, table, tune, predict, export, latency, serve, info):
    app.command()(_command)


def main() -> None:
    """Entry point: a user's mistake ends in one sentence and exit status 2, not in a traceback."""
    try:
        app()
    except (ValueError, TypeError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        if getattr(error, "told_by_first", False):  # one of several processes says it for all
            sys.exit(2)
        status.print("[bold red]Error:[/]", end=" ")
        status.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)

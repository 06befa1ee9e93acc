"""``rbm tune``."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rbm.cli.errors import advise_resuming
from rbm.cli.options import (
    CACHE,
    Assignments,
    CacheFolder,
    ConfigFile,
    Dataset,
    Device,
    Precision,
    Protocol,
    Root,
    Setting,
    TeacherName,
    Undirected,
    configuration,
    console,
    run_name,
    status,
    usable_device,
)
from rbm.utils.console import print_line, print_table

if TYPE_CHECKING:
    from rich.table import Table

    from rbm.experiments.tuning.search import Tuned


def tune(
    dataset: Dataset = None,
    root: Root = None,
    setting: Setting = None,
    protocol: Protocol = None,
    undirected: Undirected = False,
    teacher: TeacherName = None,
    method: Annotated[str, typer.Option(help="Student to tune, by its method.")] = "rbm",
    inflate: Annotated[int | None, typer.Option(help="Factor for the students' hidden width (default: 1).")] = None,
    preset: Annotated[
        str | None, typer.Option(help="Starting point of the search: clean (default), paper or official.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the search itself (default: 0).")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds that each trial runs with; more seeds mean less noise.")] = "0-1",
    precision: Precision = None,
    config: ConfigFile = None,
    set_: Assignments = None,
    space: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with choices or a range per setting (default: the method's; for rbm, the paper's)."
        ),
    ] = None,
    trials: Annotated[int, typer.Option(help="Number of trials, including the starting point.")] = 20,
    jobs: Annotated[int, typer.Option(help="Number of parallel trials.")] = 1,
    ray: Annotated[
        bool, typer.Option("--ray", help="Use Ray Tune on the RAY_ADDRESS cluster or this machine.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the search (default: runs/tune-DATASET-SETTING-PRESET-METHOD).")
    ] = None,
    device: Device = None,
    cache: CacheFolder = CACHE,
) -> None:
    """Search for settings on validation nodes (never test nodes), and write the best ones for rbm distill --config.

    The same command continues a search that was killed; with more --trials, it extends a finished one.
    """
    from rbm.experiments.experiment import parse_seeds
    from rbm.experiments.tuning.folder import FAILED
    from rbm.experiments.tuning.run import tune as search
    from rbm.experiments.tuning.space import read_space

    given = {"root": root, "setting": setting, "protocol": protocol, "seed": seed, "inflate": inflate}
    given |= {"precision": precision, "undirected": True if undirected else None}
    start = configuration(dataset, teacher, preset, given, config, set_)
    folder = out or Path("runs") / f"tune-{run_name(start)}-{method}"
    with advise_resuming():
        found = search(
            start,
            folder,
            method=method,
            seeds=parse_seeds(seeds),
            space=None if space is None else read_space(space),
            trials=trials,
            jobs=jobs,
            ray=ray,
            cache=cache,
            device=usable_device(device),
            console=status,
        )
    print_table(console, _table(found))
    if failed := [row[FAILED] for row in found.rows if row[FAILED]]:
        print_line(console, f"{len(failed)} trials failed and count as 0; the first: {failed[0]}")
    summary = f"trials: {folder / 'trials.csv'}; rbm distill --config {shlex.quote(str(folder / 'best.yaml'))}"
    print_line(console, summary)


def _table(found: "Tuned") -> "Table":
    """A table of the starting point and the best trial."""
    from rich import box
    from rich.table import Table

    pruned = sum(row["state"] == "pruned" for row in found.rows)
    table = Table(
        title=f"{len(found.rows)} trials, {pruned} of them pruned",
        title_justify="left",
        caption="Accuracy on held-out validation nodes, mean over seeds. The best of many is an optimistic figure.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("", "start", "best"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name, value in found.values.items():
        start, best = (
            f"{shown:.4g}" if isinstance(shown, float) else str(shown) for shown in (found.start_values[name], value)
        )
        table.add_row(name, start, best)
    table.add_row("accuracy", f"{found.start_accuracy:.2%}", f"{found.accuracy:.2%}", style="bold")
    return table

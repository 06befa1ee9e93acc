"""``rbm tune``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from rbm.tuning.search import Tuned


def tune(
    dataset: Annotated[
        str | None, typer.Option(help="Name, or the path of your own graph; the default, digits, needs no files.")
    ] = None,
    root: Annotated[str | None, typer.Option(help="Folder of the datasets' raw files; may be read-only.")] = None,
    setting: Annotated[str | None, typer.Option(help="transductive or inductive.")] = None,
    protocol: Annotated[
        str | None, typer.Option(help="rbm or cpf: which form and split of a named graph [default: rbm].")
    ] = None,
    teacher: Annotated[str | None, typer.Option(help="sage, gcn, revgat or drgat.")] = None,
    method: Annotated[str, typer.Option(help="The student whose settings are searched.")] = "rbm",
    inflate: Annotated[int | None, typer.Option(help="Multiplies the students' hidden width.")] = None,
    preset: Annotated[str | None, typer.Option(help="Where the search starts: clean, paper or official.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the search itself.")] = None,
    seeds: Annotated[str, typer.Option(help="Of a trial's runs, such as 0-4: more of them, less noise.")] = "0-1",
    config: Annotated[Path | None, typer.Option(help="YAML file of settings, applied after the preset.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, for example rbm.lr=0.005; repeatable.")
    ] = None,
    space: Annotated[
        Path | None, typer.Option(help="YAML file: setting -> choices or range [default: the paper's space].")
    ] = None,
    trials: Annotated[int, typer.Option(help="How many there shall be, the starting point included.")] = 20,
    jobs: Annotated[int, typer.Option(help="Trials at a time.")] = 1,
    ray: Annotated[
        bool, typer.Option("--ray", help="Through Ray Tune: the cluster of RAY_ADDRESS, or this machine.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the search [default: runs/tune-DATASET-SETTING-PRESET-METHOD].")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda [default: cuda where there is one].")] = None,
    cache: Annotated[Path, typer.Option(help="Folder of trained teachers and encodings.")] = Path("runs/cache"),
) -> None:
    """Search for settings on validation nodes, never on test nodes, and write the best for distill --config.

    The same command goes on where a search was killed, and with more --trials where it was done.
    """
    from rbm.cli import _configuration, _device, console, status
    from rbm.experiments import parse_seeds
    from rbm.tuning.run import tune as search
    from rbm.tuning.space import read_space

    given = {"root": root, "setting": setting, "protocol": protocol, "seed": seed, "inflate": inflate}
    start = _configuration(dataset, teacher, preset, given, config, set_)
    folder = out or Path("runs") / f"tune-{Path(start.dataset).stem}-{start.setting}-{start.preset}-{method}"
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
        device=_device(device),
        console=status,
    )
    console.print(_table(found))
    told = f"trials: {folder / 'trials.csv'}; rbm distill --config {folder / 'best.yaml'}"
    console.print(told, highlight=False, soft_wrap=True)


def _table(found: "Tuned") -> "Table":
    """The starting point beside the best trial."""
    from rich import box
    from rich.table import Table

    pruned = sum(row["state"] == "pruned" for row in found.rows)
    table = Table(
        title=f"{len(found.rows)} trials, {pruned} of them given up early",
        title_justify="left",
        caption="Accuracy on held-out validation nodes, mean over seeds. The best of many is an optimistic figure.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("", "start", "best"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name, value in found.values.items():
        start, best = (
            f"{each:.4g}" if isinstance(each, float) else str(each) for each in (found.start_values[name], value)
        )
        table.add_row(name, start, best)
    table.add_row("accuracy", f"{found.start_accuracy:.2%}", f"{found.accuracy:.2%}", style="bold")
    return table

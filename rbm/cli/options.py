"""Shared by the commands: consoles, options of several commands, and the configuration that options amount to."""

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

# Results go to standard output, progress and errors to standard error.
console, status = Console(), Console(stderr=True)
CACHE = Path("runs/cache")
_OF_RUNS = ("dataset", "root", "setting", "protocol", "preset", "seed")

Dataset = Annotated[
    str | None, typer.Option(help="Name, or the path of your own graph; the default, digits, needs no files.")
]
Root = Annotated[str | None, typer.Option(help="Folder of the datasets' raw files; may be read-only.")]
Setting = Annotated[str | None, typer.Option(help="transductive or inductive.")]
Protocol = Annotated[str | None, typer.Option(help="rbm or cpf: which form and split of a named graph (default: rbm).")]
TeacherName = Annotated[
    str | None, typer.Option(help="sage, gcn, gat, appnp, mlp, label_propagation, revgat or drgat.")
]
ConfigFile = Annotated[Path | None, typer.Option(help="YAML file of settings, applied after the preset.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", help="One setting, for example rbm.lr=0.005; repeatable.")
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda where there is one).")]
CacheFolder = Annotated[Path, typer.Option(help="Folder of trained teachers and encodings.")]
Jobs = Annotated[int, typer.Option(min=1, help="Processes side by side.")]
Run = Annotated[Path, typer.Argument(help="Run folder of a finished distillation.")]


def configuration(dataset, teacher, preset, given, config_file, assignments, *, resumed=None):
    """Preset, then file, then options and ``--set``; or, resuming, what the run began with, and these after it."""
    from rbm.config import Config, parse_assignments, read_changes
    from rbm.config.presets import preset_config
    from rbm.datasets import dataset_name

    given = {key: value for key, value in given.items() if value is not None}
    changes = {} if config_file is None else read_changes(config_file)
    stored = None if resumed is None else Path(resumed) / "config.yaml"
    if stored is not None and stored.is_file():
        names = {"dataset": None if dataset is None else dataset_name(dataset), "preset": preset}
        said = {name: value for name, value in names.items() if value is not None}
        said |= {} if teacher is None else {"teacher": {"name": teacher}}
        begun = Config.from_yaml(stored).updated(changes).updated({**given, **said})
        return begun.updated(parse_assignments(assignments or []))
    if stored is not None and not any((given, dataset, teacher, preset, config_file, assignments)):
        raise FileNotFoundError(f"run folder {resumed} has no config.yaml: there is no run to resume")

    dataset = dataset_name(changes.get("dataset", "digits") if dataset is None else dataset)
    preset = changes.get("preset", "clean") if preset is None else preset
    teacher = changes.get("teacher", {}).get("name", "sage") if teacher is None else teacher
    setting, protocol = (
        given.get(name, changes.get(name, usual)) for name, usual in (("setting", "transductive"), ("protocol", "rbm"))
    )
    chosen = preset_config(preset, dataset, setting, teacher, protocol).updated(changes)
    fixed = {**given, "dataset": dataset, "preset": preset, "teacher": {"name": teacher}}
    return chosen.updated(fixed).updated(parse_assignments(assignments or []))


def lasting_changes(config_file, assignments) -> dict:
    """What a file and ``--set`` change beyond the preset, without the settings in which the runs differ."""
    from rbm.config import merged, parse_assignments, read_changes

    changes = {} if config_file is None else read_changes(config_file)
    changes = merged(changes, parse_assignments(assignments or []))
    return {key: value for key, value in changes.items() if key not in _OF_RUNS}


def run_name(config) -> str:
    """The default name of a folder or file of runs."""
    protocol = [] if config.protocol == "rbm" else [config.protocol]
    return "-".join([Path(config.dataset).stem, *protocol, config.setting, config.preset])


def usable_device(name: str | None) -> str:
    """The device of that name, CUDA's where none is named and there is one; ValueError where it does not work."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device is {name!r}, expected cpu, cuda, or cuda:0 and so on")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device is {name!r}, which is not usable here: {str(error).splitlines()[0]}") from error
    return name

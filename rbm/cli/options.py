"""Consoles, options used by several commands, and the configuration that the options describe."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

# Results go to standard output, progress and errors to standard error.
console, status = Console(), Console(stderr=True)
CACHE = Path("runs/cache")
# Panels of `--help`.
GRAPH, STUDENTS, SETTINGS, FOLDER, EXECUTION = "Graph", "Teacher and students", "Settings", "Run folder", "Execution"
_OF_RUNS = ("dataset", "root", "setting", "protocol", "preset", "seed")

Dataset = Annotated[
    str | None,
    typer.Option(
        help="Name, or path of your own graph (default: digits, which needs no files).", rich_help_panel=GRAPH
    ),
]
Root = Annotated[
    str | None, typer.Option(help="Folder with the datasets' raw files; may be read-only.", rich_help_panel=GRAPH)
]
Setting = Annotated[
    str | None,
    typer.Option(
        help="transductive (default), or inductive: some test nodes are not seen in training.", rich_help_panel=GRAPH
    ),
]
Protocol = Annotated[
    str | None, typer.Option(help="Version and split of a named graph: rbm (default) or cpf.", rich_help_panel=GRAPH)
]
Undirected = Annotated[
    bool,
    typer.Option("--undirected", help="Add the reverse of each edge of your own graph's files.", rich_help_panel=GRAPH),
]
TeacherName = Annotated[
    str | None,
    typer.Option(
        help="sage (default), gcn, gat, appnp, mlp, label_propagation, revgat, drgat, or logits: those in your graph's"
        " files.",
        rich_help_panel=STUDENTS,
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        help="float32 (default), or bfloat16 for mixed precision: faster on CPUs with AVX512-BF16 or AMX, slower"
        " on others; not yet run on a GPU.",
        rich_help_panel=SETTINGS,
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option(help="YAML file of settings, applied after the preset.", rich_help_panel=SETTINGS)
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", help="One setting, such as rbm.lr=0.005; repeatable.", rich_help_panel=SETTINGS),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:N (default: cuda if available).", rich_help_panel=EXECUTION)
]
CacheFolder = Annotated[
    Path, typer.Option(help="Folder in which trained teachers and encodings are cached.", rich_help_panel=EXECUTION)
]
Jobs = Annotated[int, typer.Option(min=1, help="Number of parallel processes.", rich_help_panel=EXECUTION)]
Run = Annotated[Path, typer.Argument(help="Run folder of a finished rbm distill.")]


def configuration(dataset, teacher, preset, given, config_file, assignments, *, resumed=None):
    """The preset, changed by the file, then by options and ``--set``. If a run is resumed, the stored configuration
    replaces the preset.
    """
    from rbm.config import Config, merged, parse_assignments, read_changes
    from rbm.config.presets import preset_config
    from rbm.datasets import dataset_name
    from rbm.training.run_folder import check_place

    given = {key: value for key, value in given.items() if value is not None}
    changes = {} if config_file is None else read_changes(config_file)
    stored = None if resumed is None else Path(resumed) / "config.yaml"
    if stored is not None and stored.is_file():
        names = {"dataset": None if dataset is None else dataset_name(dataset), "preset": preset}
        given_options = {name: value for name, value in names.items() if value is not None}
        given_options |= {} if teacher is None else {"teacher": {"name": teacher}}
        said = merged(merged(changes, {**given, **given_options}), parse_assignments(assignments or []))
        return Config.from_yaml(stored).updated(said)
    if stored is not None and not any((given, dataset, teacher, preset, config_file, assignments)):
        check_place(Path(resumed), resume=True, overwrite=False)
        raise FileNotFoundError(
            f"run folder {resumed} has no config.yaml: its run ended before it stored its settings; repeat the whole"
            " command that started it"
        )

    # The preset is chosen by what all of them say together, so that --set teacher.name=gcn is --teacher gcn.
    assigned = parse_assignments(assignments or [])
    options = {"dataset": dataset, "preset": preset, "teacher": None if teacher is None else {"name": teacher}}
    options = {name: value for name, value in options.items() if value is not None}
    said = merged(merged(changes, {**given, **options}), assigned)
    dataset, preset = dataset_name(said.get("dataset", "digits")), said.get("preset", "clean")
    setting, protocol = said.get("setting", "transductive"), said.get("protocol", "rbm")
    if not isinstance(said.get("teacher", {}), dict) or not isinstance(said.get("teacher", {}).get("name", ""), str):
        Config().updated({"teacher": said["teacher"]})  # raises
    teacher = said.get("teacher", {}).get("name", "sage")
    chosen = preset_config(preset, dataset, setting, teacher, protocol).updated(said)
    return chosen.updated({"dataset": dataset, "preset": preset, "teacher": {"name": teacher}})


def lasting_changes(config_file, assignments) -> dict:
    """What a file and ``--set`` change on top of the preset, without the settings that differ between runs and without
    the name of the teacher, which :func:`configuration` has chosen: ``--teacher`` comes before a file's.
    """
    from rbm.config import merged, parse_assignments, read_changes

    changes = {} if config_file is None else read_changes(config_file)
    changes = merged(changes, parse_assignments(assignments or []))
    lasting = {key: value for key, value in changes.items() if key not in _OF_RUNS}
    if "teacher" in lasting:
        lasting["teacher"] = {key: value for key, value in lasting["teacher"].items() if key != "name"}
    return lasting


def run_name(config) -> str:
    """The default name of a run folder or of a CSV file of runs."""
    protocol = [] if config.protocol == "rbm" else [config.protocol]
    return "-".join([Path(config.dataset).stem, *protocol, config.setting, config.preset])


def usable_device(name: str | None) -> str:
    """Check a device name; None means CUDA if available, else the CPU. ValueError if the device is not usable."""
    import torch

    from rbm.utils.arguments import usable_device as checked

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return checked(name)

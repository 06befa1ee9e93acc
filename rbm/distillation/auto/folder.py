"""The files of a search in its run folder: description and trials, from which it can be resumed, and the result.

==================  ====================================================================
``auto.yaml``       description of the search and, when it has finished, the choice
``auto.db``         Optuna's database of trials (SQLite)
``auto.csv``        one row per trial
``config.yaml``     the chosen configuration, with which the run continues
==================  ====================================================================
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rbm.config import LATER_SETTINGS, Config, differences
from rbm.distillation.auto.search import Search, rows, sampler
from rbm.distillation.auto.space import Space
from rbm.distillation.choices import Choices
from rbm.training.run_files import begin_list, list_file, remove_run
from rbm.training.run_folder import check_place
from rbm.utils.files import read_yaml, write_csv, write_text
from rbm.utils.locks import only_process
from rbm.utils.studies import import_optuna, open_trials

if TYPE_CHECKING:
    from optuna import Study

_STUDY = "auto"
BEGUN = "auto.yaml"
_MAY_CHANGE = ("budget", "config.root", "halves", "keep", "labels_alone")
_HALVES = "paired"  # an earlier version drew different halves and did not store answers
# With the journal that SQLite may leave behind when the process is killed.
_FILES = ("auto.db", "auto.db-journal", "auto.csv")


class AutoFolder:
    """The search of one run folder. No other process may write to the folder at the same time.

    Attributes:
        path: the run folder.
        description: settings that define the search, see :func:`describe`.
        chosen: the choice from ``auto.yaml``; None until the search has finished.
    """

    def __init__(self, path: Path, description: dict[str, Any], *, resume: bool) -> None:
        self.path, self.description = path, description
        resume = resume and (path / BEGUN).is_file()  # it may have been killed before
        if not resume:
            remove_run(path)
        begin_list(path)
        for name in (BEGUN, *_FILES):
            list_file(path / name)
        self.chosen = None
        if resume:
            known = read_begun(path)
            self.chosen = known.get("chosen") if (path / "config.yaml").is_file() else None
            if self.chosen is None and known["search"].get("halves") != _HALVES:
                raise ValueError(
                    f"run folder {path} holds a search that a former version began, and judged in another way; use"
                    " another --out, or --overwrite"
                )
            for name, was, now in differences(known["search"], description):
                if name not in _MAY_CHANGE:
                    raise ValueError(
                        f"run folder {path} holds a search of other settings: {name.removeprefix('config.')} (was"
                        f" {was}, now {now}); give them as they were, to go on, or use another --out"
                    )
        if self.chosen is None:  # what may change is stored too
            self._write({})

    @contextmanager
    def study(self) -> Iterator["Study"]:
        """Optuna's study with the stored trials."""
        with open_trials(self.path / "auto.db", "use another --out, or --overwrite") as storage:
            yield new_study(storage)

    def note(self, search: Search) -> None:
        """Write the present state to ``auto.csv``, once there is a trial."""
        if found := rows(search):
            write_csv(self.path / "auto.csv", found)

    def end(self, config: Config, chosen: dict[str, Any]) -> None:
        """End the search: write the choice and the configuration of the run that follows."""
        self._write({"chosen": chosen})
        list_file(self.path / "config.yaml")
        write_text(self.path / "config.yaml", config.to_yaml())
        self.chosen = chosen

    def _write(self, further: dict[str, Any]) -> None:
        write_text(self.path / BEGUN, yaml.safe_dump({"search": self.description, **further}, sort_keys=False))


@contextmanager
def open_auto(path: Path, description: dict[str, Any], *, resume: bool, overwrite: bool) -> Iterator[AutoFolder]:
    """Open the search of a run folder.

    Raises:
        FileExistsError, FileNotFoundError: the folder already contains a run, or there is none to resume.
        ValueError: the search to resume differs from the search in the folder.
        BlockingIOError: another process has the folder open.
    """
    check_place(path, resume, overwrite, BEGUN)
    path.mkdir(parents=True, exist_ok=True)
    with only_process(path / ".run.lock", f"run folder {path}", "wait until that run has ended, or use another --out"):
        yield AutoFolder(path, description, resume=resume)


def new_study(storage: Any = None) -> "Study":
    """A study in a storage, or in memory, that prunes trials by successive halving."""
    optuna = import_optuna()
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(
            storage=storage,
            study_name=_STUDY,
            direction="maximize",
            sampler=sampler(),
            pruner=pruner,
            load_if_exists=True,
        )
    finally:
        optuna.logging.set_verbosity(verbosity)


def read_begun(path: Path | str) -> dict[str, Any]:
    """``auto.yaml`` of a run folder.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged.
    """
    file = Path(path) / BEGUN
    found = read_yaml("search", file)
    if not isinstance(found, dict) or not isinstance(found.get("search"), dict):
        raise ValueError(f"search {file} is damaged: expected what a search wrote; use another --out, or --overwrite")
    return found


def choices_of_search(path: Path) -> Choices:
    """What the run after a search is asked for."""
    known = read_begun(path)["search"]
    alone = known["methods"][0] if known["methods"] != known["run"] else None
    return Choices(known["run"], known.get("keep", alone), known.get("labels_alone", True))


def read_chosen(path: Path | str | None) -> dict[str, Any] | None:
    """The choice of the search of a run folder; None without a folder, a search or a choice."""
    return None if path is None or not (Path(path) / BEGUN).is_file() else read_begun(path).get("chosen")


def config_of(description: dict[str, Any]) -> Config:
    """The configuration that a search started from."""
    return Config().updated(LATER_SETTINGS).updated(description["config"])


def describe(space: Space, asked: Choices, budget: float, graph: str) -> dict[str, Any]:
    """The settings that define a search. When it is resumed, only :data:`_MAY_CHANGE` may differ.

    Args:
        space: search space.
        asked: what the run after the search is asked for.
        budget: seconds.
        graph: fingerprint of the graph.
    """
    what = {"halves": _HALVES, "methods": list(space.methods), "run": [*asked.methods], "teacher": space.teacher}
    if space.features_only:  # absent in searches of earlier versions
        what["features_only"] = True
    if asked.keep not in (None, *asked.methods):  # a search for one of them is for it alone
        what["keep"] = asked.keep
    if not asked.labels_alone:
        what["labels_alone"] = False
    return {**what, "budget": budget, "graph": graph, "config": asdict(space.given)}

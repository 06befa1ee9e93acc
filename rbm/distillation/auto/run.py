"""The search before a run, which finds a configuration for a graph within a time budget."""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch_geometric.data import Data

from rbm.config import Config
from rbm.datasets import num_classes
from rbm.datasets.splits import halved, split_for
from rbm.distillation.auto.folder import AutoFolder, describe, new_study, open_auto
from rbm.distillation.auto.search import MOST_HALVES, Search, point_of, rows
from rbm.distillation.auto.space import GIVEN, MODULE, Point, Space
from rbm.distillation.choices import Choices
from rbm.distillation.result import Distillation
from rbm.distillation.sentences import search_sentence
from rbm.distillation.verdict import rows_of
from rbm.nn.students import predict
from rbm.teachers.prepare import share_training
from rbm.utils.cache import Cache, cache_or_temporary
from rbm.utils.distributed import world_size
from rbm.utils.precision import fast_float32
from rbm.utils.progress import Progress, count_runs
from rbm.utils.repeatable import deterministic
from rbm.utils.studies import import_optuna
from rbm.utils.tensor_files import fingerprint

BUDGET = "10m"
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Chosen:
    """Result of a search.

    Attributes:
        config: the chosen configuration of the run.
        outcome: facts about the search for the verdict, see :func:`outcome_of`.
        seconds: duration of the search.
        rows: one dictionary per trial, as in ``auto.csv``; None if the search was finished by an earlier process.
    """

    config: Config
    outcome: dict[str, Any]
    seconds: float
    rows: list[dict[str, Any]] | None


@dataclass(frozen=True)
class Judge:
    """Trains points on halves of a graph's validation nodes, without the test set.

    Attributes:
        train: :func:`rbm.distillation.distill.distill`.
        observed: what training may see of the graph, without the labels of test nodes.
        classes: C.
        space: search space, for the configuration of a point.
        teacher: a trained module, or None to train the teachers of the points.
        cache: folder of trained teachers and encodings, or None.
    """

    train: Callable[..., Any]
    observed: Data
    classes: int
    space: Space
    teacher: nn.Module | None
    cache: Path | None = None

    def __call__(self, point: Point, half: int) -> str:
        """Answers of the student on the held-out half, at the epoch that the other half selects: one character per
        validation node, ``1`` correct, ``0`` wrong, ``-`` not held out. Empty if the values are not compatible, the
        loss is not finite, or memory runs out.
        """
        try:
            config = replace(self.space.config(point), evaluate_on="test")  # the held-out half is the test set
        except ValueError:
            return ""
        graph = self._half(config, half)
        trains_teacher = self.teacher is None and config.teacher.name != "logits"
        try:
            self._share_teacher(config, half)
            result = self.train(
                graph,
                self.teacher,
                config=config,
                methods=[point["method"]],
                labels_alone=trains_teacher and config.distill.source == "auto",  # auto needs that MLP
                cache=self.cache,
                measure_latency=False,
                console=None,
            )
        except (FloatingPointError, MemoryError, torch.OutOfMemoryError):
            return ""
        return self._answers(result, point["method"])

    @torch.no_grad()
    def _answers(self, result: Distillation, method: str) -> str:
        split, validation = result.split, self.observed.val_mask
        held_out = split.graph.test_mask
        nodes = held_out.nonzero().flatten()
        with fast_float32(validation.device):  # as in training
            logits = predict(result.students[method], rows_of(split, result.encodings[method], nodes))
        right = held_out.long()
        right[nodes] += logits.argmax(-1) == split.graph.y[nodes]
        return "".join("-01"[digit] for digit in right[validation].tolist())

    def _half(self, config: Config, half: int) -> Data:
        """Halves come in complementary pairs: two halves contain each validation node once, four twice."""
        return halved(self.observed, self.classes, config.seed + half // 2, other=half % 2 == 1)

    def _share_teacher(self, config: Config, half: int) -> None:
        """In the transductive setting, halves only differ in which nodes select the epoch and which are held out, so
        one training gives the teachers of all halves. In the inductive setting, the held-out half is not in the graph,
        so each half needs its own training.
        """
        untrained = self.teacher is not None or config.teacher.name in ("logits", "label_propagation")
        if self.cache is None or config.setting != "transductive" or untrained:
            return
        splits = [split_for(config, self._half(config, index)) for index in range(MOST_HALVES)]
        with deterministic(), fast_float32(self.observed.x.device):
            share_training(splits, half, config, self.classes, Cache(self.cache), Progress(None))


def choose(
    train: Callable[..., Any],
    data: Data,
    teacher: nn.Module | None,
    config: Config,
    *,
    teacher_name: str | None,
    methods: tuple[str, ...],
    asked: Choices,
    budget: float,
    folder: Path | str | None,
    resume: bool,
    overwrite: bool,
    cache: Path | str | None,
    unseen_fraction: float | None,
    console: Console | None,
    features_only: bool = False,
    reserve: float = 0.0,
) -> Chosen:
    """Search for a configuration within a budget of time.

    ``train`` is :func:`rbm.distill`, which trains every trial. ``teacher`` is a trained module for all trials, or None.
    ``teacher_name`` is the name of the teacher of all trials, or None to search for it. ``methods`` are searched;
    ``asked`` is what the run after the search is asked for. ``budget`` is in seconds; ``reserve`` seconds of it are for
    the end of the run, after its trainings. The other arguments are those of :func:`rbm.distill`.

    Raises:
        ValueError: Optuna is not installed, several processes train together, or the folder contains another search.
        FileExistsError, FileNotFoundError: the folder already contains a run, or there is none to resume.
        BlockingIOError: another process has the folder open.
    """
    import_optuna()
    if world_size() > 1:
        raise ValueError(
            f"auto is asked for in {world_size()} processes that train together; search in one process, then train with"
            " the config.yaml of its run folder"
        )
    space = Space(config, methods, teacher_name if teacher is None else MODULE, features_only, asked.methods)
    observed = _observed(data, config, unseen_fraction)
    judge = Judge(train, observed, num_classes(data), space, teacher)
    progress = Progress(console)
    options = {"budget": budget, "run": asked.methods, "reserve": reserve}
    if folder is None:
        return _search(judge, new_study(), None, cache, console, options)
    description = describe(space, asked, budget, _graph_name(observed))
    with open_auto(Path(folder), description, resume=resume, overwrite=overwrite) as place:
        if place.chosen is not None:
            progress.say(f"search: finished before, taken from {place.path}")
            return Chosen(Config.from_yaml(place.path / "config.yaml"), place.chosen, 0.0, None)
        with place.study() as study:
            found = _search(judge, study, place, cache, console, options)
        place.end(found.config, found.outcome)
        return found


def _search(
    judge: Judge,
    study: Any,
    place: AutoFolder | None,
    cache: Path | str | None,
    console: Console | None,
    options: dict[str, Any],
) -> Chosen:
    with cache_or_temporary(cache) as shared, count_runs(console, "search, seconds", round(options["budget"])) as bar:

        def note(search: Search, trial: int) -> None:
            if place is not None:
                place.note(search)
            bar.update(round(search.spent()), _status(search, trial))

        judge = replace(judge, cache=shared)
        search = Search(judge.space, judge, study, seed=judge.space.given.seed, note=note, **options)
        search.run()
    if place is not None:
        place.note(search)
    outcome = outcome_of(search)
    if search.needed is not None:  # before the run, which may take longer than the budget
        Progress(console).say(search_sentence(outcome))
    config = judge.space.given if outcome["choice"] is None else judge.space.config(outcome["choice"])
    return Chosen(config, outcome, search.spent() + search.stopped, rows(search))


def outcome_of(search: Search) -> dict[str, Any]:
    """The outcome of a search, as the verdict and ``summary.json`` report it.

    Returns:
        ``budget`` in seconds; ``needed``, the seconds that a search and its run need at least if the budget is too
        small for the starting points, or None; the numbers of ``trials``, and of those that are ``complete`` or
        ``given_up``; ``halves`` of a complete trial; ``choice``, the chosen point, ``changed``, its values that differ
        from the configuration it starts from, and its ``accuracy``; ``given_accuracy``, the best accuracy of the
        configuration that the search started from; ``gain``, the lead of the best trial over it, and the ``error`` of
        the lead (:class:`rbm.distillation.auto.trials.Lead`); ``corrected``, the expected gain corrected for selection
        bias (:func:`rbm.distillation.auto.trials.corrected_gain`), which decides the choice; ``tried``, the number of
        other points. Accuracies are means over halves, and None if no trial is complete.
    """
    corrected = search.corrected_gain()
    best, given, lead = search.choice(corrected), search.given(), search.lead(search.best())
    choice = {} if best is None else point_of(best)
    starts = {(point["start"], point["method"]): point for point in search.starts}
    before = starts[choice["start"], choice["method"]] if choice else {}
    states = [trial.state.name for trial in search.trials()]
    return {
        "budget": search.budget,
        "needed": search.needed,
        "trials": len(rows(search)),
        "complete": states.count("COMPLETE"),
        "given_up": states.count("PRUNED"),
        "halves": search.halves,
        "choice": choice or None,
        "changed": {name: value for name, value in choice.items() if value != before[name]},
        "accuracy": None if best is None else search.accuracy(best),
        "given_accuracy": None if given is None else search.accuracy(given),
        "gain": None if lead is None else lead.gain,
        "error": None if lead is None else lead.error,
        "corrected": corrected,
        "tried": search.tried,
    }


def searched_for(outcome: dict[str, Any] | None) -> str | None:
    """The method for which a search has changed settings; None if it chose the given configuration."""
    choice = (outcome or {}).get("choice")
    return choice["method"] if choice and (choice["start"] != GIVEN or outcome["changed"]) else None


def budget_in_seconds(auto: bool, budget: float | str | None, encodings: Sequence[Tensor]) -> float:
    """The seconds of a run's budget, by default :data:`BUDGET`.

    Raises:
        ValueError: the budget cannot be parsed or is given without a search, or encodings are given with a search.
    """
    if budget is not None and not auto:
        raise ValueError(f"budget is {budget!r}, which only a search has; give auto as well (--auto), or leave it out")
    if auto and len(encodings):
        raise ValueError("auto and encodings do not go together: a search chooses encodings; leave one of them out")
    return parse_budget(BUDGET if budget is None else budget)


def parse_budget(budget: float | str) -> float:
    """Seconds of ``90``, ``"90s"``, ``"10m"`` or ``"1.5h"``.

    Raises:
        ValueError: the format is unknown, or the number is not positive.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([smh]?)\s*", str(budget), re.ASCII)
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not seconds > 0:
        raise ValueError(f"budget is {budget!r}, expected a time such as 90s, 10m or 1.5h")
    return seconds


def with_logits(data: Data, logits: Tensor) -> Data:
    """A copy of the graph with a teacher's logits ``[N, C]`` as a node attribute, which splits select like nodes."""
    graph = copy.copy(data)
    graph.teacher_logits = logits
    return graph


def _observed(data: Data, config: Config, unseen_fraction: float | None) -> Data:
    """The part of the graph that the run may see, without the labels of test nodes."""
    observed = copy.copy(split_for(config, data, unseen_fraction=unseen_fraction).observed)
    observed.y = observed.y.masked_fill(observed.test_mask, -1)
    return observed


def _graph_name(observed: Data) -> str:
    """A fingerprint of everything that a search may see of a graph."""
    return fingerprint(
        "auto", {}, [observed.x, observed.edge_index, observed.y, observed.train_mask, observed.val_mask]
    )


def _status(search: Search, trial: int) -> str:
    last = next(row for row in rows(search) if row["trial"] == trial)
    known = sum(name.startswith("half ") and value != "" for name, value in last.items())
    what = ", ".join(str(last[name]) for name in ("method", "teacher", "encoding") if last[name])
    best = search.best()
    best_text = "" if best is None else f"  best {search.accuracy(best):.2%}"
    return f"trial {last['trial'] + 1}: {what} {float(last['accuracy']):.2%} ({known} of {search.halves}){best_text}"

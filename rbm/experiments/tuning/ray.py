"""The same search with Ray Tune, which distributes trials over the machines of a cluster.

Optuna proposes the settings, and its study is stored in the same file as without Ray. Only the process that started the
search accesses this file.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rbm.datasets.registry import is_path
from rbm.experiments.tuning.folder import FAILED, STUDY, finished
from rbm.experiments.tuning.search import Search
from rbm.experiments.tuning.session import Session
from rbm.utils.cluster import connected
from rbm.utils.files import as_path
from rbm.utils.plugins import load_plugin, loaded_plugins

METRIC = "accuracy"


def run_on_ray(session: Session) -> None:
    """Run the missing trials. Each uses one processor, and one GPU if models are trained on a GPU.

    Raises:
        ChildProcessError: trials failed; the successful ones are kept.
    """
    with connected():
        from pyarrow.fs import LocalFileSystem  # which Ray Tune needs
        from ray import tune
        from ray.tune.search.optuna import OptunaSearch

        class Searcher(OptunaSearch):
            def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
                if result[FAILED]:
                    self._ot_trials[trial_id].set_user_attr(FAILED, result[FAILED])
                super().on_trial_result(trial_id, result)

        class Note(tune.Callback):
            def __init__(self, note: Callable[[], None]) -> None:
                self.note = note

            def on_trial_complete(self, **info: Any) -> None:
                self.note()

            def __getstate__(self) -> dict[str, Any]:
                return {}  # Ray saves this to restore its own state; ours is in the study

        given = {"search": _with_absolute_paths(session.search), "device": session.device, "plugins": loaded_plugins()}
        given["cache"] = None if session.cache is None else session.cache.resolve()
        resources = {"cpu": 1, "gpu": int(session.device.startswith("cuda"))}
        searcher = Searcher(
            session.search.space(),
            metric=METRIC,
            mode="max",
            sampler=session.sampler(),
            study_name=STUDY,
            storage=session.storage,
        )
        settings = tune.TuneConfig(
            search_alg=searcher,
            num_samples=session.trials - len(finished(session.study)),
            max_concurrent_trials=session.jobs,
            reuse_actors=True,
        )
        place = {"storage_path": str(session.folder.resolve()), "storage_filesystem": LocalFileSystem()}
        run = tune.RunConfig(name="ray", **place, callbacks=[Note(session.note)], verbose=0)
        trainable = tune.with_resources(tune.with_parameters(judge, **given), resources)
        results = tune.Tuner(trainable, tune_config=settings, run_config=run).fit()
        session.note()
        if results.errors:
            raise ChildProcessError(f"{len(results.errors)} trials failed on Ray; the first: {results.errors[0]}")


def judge(values: dict[str, Any], search: Search, cache: Path | None, device: str, plugins: tuple[str, ...]) -> None:
    """Run one trial, on any machine, and report the mean accuracy so far after each seed,
    and why the seed failed, if it did.
    """
    from ray import tune

    for plugin in plugins:
        load_plugin(plugin)
    accuracies: list[float] = []
    for seed in search.seeds:
        accuracy, reason = search.attempt(values, seed, cache, device)
        accuracies.append(accuracy)
        tune.report({METRIC: sum(accuracies) / len(accuracies), FAILED: reason})


def _with_absolute_paths(search: Search) -> Search:
    """The search with absolute paths, since Ray runs trials in other folders."""
    start, paths = search.start, {}
    if start.root:
        paths["root"] = str(as_path("root", start.root).resolve())
    if is_path(start.dataset):
        paths["dataset"] = str(as_path("dataset", start.dataset).resolve())
    return replace(search, start=replace(start, **paths))

"""The calls of a search to Ray Tune, with a fake of Ray that runs the trials in this process."""

import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from rbm.experiments.tuning.run import tune

optuna = pytest.importorskip("optuna")
pytest.importorskip("pyarrow")


class FakeSearch:
    """What ``ray.tune.search.optuna.OptunaSearch`` does with Optuna."""

    def __init__(self, space, *, metric, mode, sampler, study_name, storage):
        assert mode == "max"
        self.space, self.metric = space, metric
        self.study = optuna.load_study(study_name=study_name, storage=storage, sampler=sampler)
        self._ot_trials = {}

    def suggest(self, trial_id):
        self._ot_trials[trial_id] = self.study.ask(self.space)
        return self._ot_trials[trial_id].params

    def on_trial_result(self, trial_id, result):
        self._ot_trials[trial_id].report(result[self.metric], result["training_iteration"])

    def on_trial_complete(self, trial_id, result):
        self.study.tell(self._ot_trials[trial_id], result[self.metric])


class FakeTuner:
    def __init__(self, trainable, *, tune_config, run_config):
        assert Path(run_config.storage_path).is_absolute()
        assert Path(run_config.storage_path).is_dir()
        self.trainable, self.tune_config, self.run_config = trainable, tune_config, run_config

    def fit(self):
        searcher = self.tune_config.search_alg
        for trial in map(str, range(self.tune_config.num_samples)):
            values, results = searcher.suggest(trial), []

            def report(metrics, trial=trial, results=results):
                results.append({**metrics, "training_iteration": len(results) + 1})
                searcher.on_trial_result(trial, results[-1])

            sys.modules["ray.tune"].report = report
            self.trainable(values)
            searcher.on_trial_complete(trial, results[-1])
            for callback in self.run_config.callbacks:
                callback.on_trial_complete(trial=trial)
        return SimpleNamespace(errors=[])


@pytest.fixture
def fake_ray(monkeypatch):
    for name in ("ray", "ray.tune", "ray.tune.search", "ray.tune.search.optuna"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    ray, ray_tune = sys.modules["ray"], sys.modules["ray.tune"]
    ray.is_initialized, ray.tune = (lambda: True), ray_tune
    ray_tune.Callback, ray_tune.Tuner = object, FakeTuner
    ray_tune.TuneConfig = ray_tune.RunConfig = SimpleNamespace
    ray_tune.with_parameters, ray_tune.with_resources = partial, lambda trainable, _: trainable
    sys.modules["ray.tune.search.optuna"].OptunaSearch = FakeSearch


def test_trials_are_in_the_folder_with_the_reasons_of_failed_ones(fake_ray, start, tmp_path, monkeypatch):
    """Regression test: Ray was given "." as its folder, which it refused, and reasons were not stored."""
    monkeypatch.chdir(tmp_path)
    space = {"rbm.num_experts": [4, 5000]}
    found = tune(start, "out", space=space, seeds=(0, 1), trials=4, ray=True)
    assert {row["rbm.num_experts"] for row in found.rows} == {4, 5000}
    for row in found.rows:
        fails = row["rbm.num_experts"] == 5000
        assert (float(row["accuracy"]) == 0, "use at most as many experts as nodes" in row["failed"]) == (fails, fails)

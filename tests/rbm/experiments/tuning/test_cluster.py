"""The same search on Ray with two workers on this machine."""

import pytest

from rbm.experiments.tuning.run import tune

pytest.importorskip("optuna")
ray = pytest.importorskip("ray")
pytest.importorskip("ray.tune")

SPACE = {"rbm.lr": [0.1, 0.01, 0.001], "rbm.dropout": {"low": 0.0, "high": 0.6}}


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # otherwise Ray writes a secret into the home folder
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.slow
def test_two_workers_share_the_trials_and_the_file_goes_on_without_them(cluster, start, tmp_path):
    options = {"space": SPACE, "cache": tmp_path / "cache"}
    found = tune(start, tmp_path / "out", trials=3, jobs=2, ray=True, **options)
    assert ray.is_initialized(), "a cluster that was there before stays"
    alone = tune(start, tmp_path / "alone", trials=1, **options)
    assert len(found.rows) == 3
    assert all(row["state"] == "complete" and row["seed 1"] for row in found.rows)
    assert found.start_values == alone.start_values
    assert found.start_accuracy == alone.start_accuracy
    assert found.accuracy >= found.start_accuracy
    assert found.accuracy == pytest.approx(max(float(row["accuracy"]) for row in found.rows), abs=1e-5)
    more = tune(start, tmp_path / "out", trials=4, **options)
    assert more.rows[:3] == found.rows, "without Ray the search goes on from the same file"
    assert len(more.rows) == 4


@pytest.mark.slow
def test_a_trial_that_fails_has_its_reason(cluster, start, tmp_path):
    """Regression test: the reason was not stored."""
    space = {"rbm.num_experts": [4, 5000]}
    found = tune(start, tmp_path / "100%41?", space=space, seeds=(0,), trials=4, ray=True)
    assert {row["rbm.num_experts"] for row in found.rows} == {4, 5000}
    for row in found.rows:
        fails = row["rbm.num_experts"] == 5000
        assert ("use at most as many experts as nodes" in row["failed"]) == fails
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["100%41?"]

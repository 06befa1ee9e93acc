"""Optuna's trials in a file."""

import pytest

from rbm.utils.studies import open_trials

optuna = pytest.importorskip("optuna")


@pytest.mark.parametrize("name", ["trials", "what?x=1", "{a}", "50%20"])
def test_trials_are_in_their_file_whatever_its_name(tmp_path, name):
    """Addresses of databases give some characters a meaning: trials went to another file, or the path was an error."""
    file = tmp_path / name / "trials.db"
    file.parent.mkdir()
    for known in (False, True):
        with open_trials(file, "") as storage:
            assert bool(optuna.get_all_study_names(storage)) == known
            optuna.create_study(study_name="one", storage=storage, load_if_exists=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]

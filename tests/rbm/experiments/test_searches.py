"""Committed searches: each row belongs to a file in experiments/searches, or a script, and has the same settings."""

import csv
import re
import runpy
from pathlib import Path

import pytest

from rbm.distillation.registry import METHODS
from rbm.experiments.experiment import Experiment
from rbm.experiments.results import config_fingerprint

ROOT = Path(__file__).parents[3]
SEARCHES, ROWS = ROOT / "experiments/searches", ROOT / "results/searches"
SCRIPTS = {"learning_rates"}  # rows of a script in experiments/ that is not made of experiments
# Rows of variants that were removed from their file after one seed, as noted in the file or in docs/experts.md.
DROPPED = {"experts_seen": 11, "photo": 10}


@pytest.fixture(scope="module")
def asked():
    """File of rows -> dataset, setting, variant, method and seed of a row -> fingerprint of its settings."""
    before = dict(METHODS)
    runpy.run_path(str(ROOT / "experiments/expert_candidates.py"))
    found: dict[str, dict[tuple[str, ...], str]] = {}
    searches = []
    for path in sorted(SEARCHES.glob("*.yaml")):
        written = re.search(r"results/searches/(\w+)\.csv", path.read_text())
        assert written, f"{path.name} does not say where its rows are"
        searches.append((written[1], Experiment.from_yaml(path)))
    of_teachers = runpy.run_path(str(ROOT / "experiments/teacher_settings.py"))
    for teacher in of_teachers["VARIANTS"]:
        searches += [("teacher_settings", experiment) for experiment in of_teachers["experiments"](teacher)]
    for name, experiment in searches:
        rows = found.setdefault(name, {})
        for task in experiment.tasks():
            config = experiment.config(task)
            for method in experiment.methods:
                place = (task.dataset, task.setting, task.variant, method, str(task.seed))
                rows[place] = config_fingerprint(config, method)
    yield found
    METHODS.clear()
    METHODS.update(before)


def test_every_file_of_rows_has_a_search(asked):
    assert {path.stem for path in ROWS.glob("*.csv")} - SCRIPTS == set(asked)


@pytest.mark.parametrize("name", sorted({path.stem for path in ROWS.glob("*.csv")} - SCRIPTS))
def test_rows_have_the_settings_of_their_search(asked, name):
    with open(ROWS / f"{name}.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["method"] != "teacher"]
    assert rows
    wrong, dropped = [], 0
    for row in rows:
        place = tuple(row[key] for key in ("dataset", "setting", "variant", "method", "seed"))
        wanted = asked[name].get(place)
        dropped += wanted is None
        if wanted not in (None, row["config"]):
            wrong.append((*place, row["config"], wanted))
    assert wrong == [], "a preset that has changed is pinned by `changes` of the older searches"
    assert dropped == DROPPED.get(name, 0), "rows that no search asks for"

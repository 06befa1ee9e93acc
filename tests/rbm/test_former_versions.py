"""Files of version 0.1.0 can still be read, and the names that its plugins import still exist.

``runs_of_0_1_0`` contains two run folders on digits made by commit 6f8a1c6, with networks of width 8 and 6 epochs: a
finished run, with the student's logits for five rows, and one that was killed in the last phase.
"""

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch

import rbm
from rbm.config import Config
from rbm.distillation import distill as distillation
from rbm.distillation import registry, request
from rbm.training.run_folder import RunFolder

RUNS = Path(__file__).parent / "runs_of_0_1_0"


def test_a_finished_run_loads():
    student = rbm.load(RUNS / "finished")
    rows = torch.linspace(-1, 1, 5 * student.in_channels).reshape(5, -1)
    with torch.inference_mode():
        logits = student(rows)
    expected = torch.tensor(json.loads((RUNS / "finished" / "logits.json").read_text()))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_killed_run_goes_on(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(RUNS / "killed", folder)
    config = Config.from_yaml(folder / "config.yaml")
    begun = RunFolder(folder, config, resume=True).load_checkpoint()
    assert (begun["phase"], begun["epoch"]) == ("rbm", 5)
    rbm.distill(rbm.load_dataset("digits"), config=config, folder=folder, methods=("mlp", "rbm"), resume=True)
    summary, whole = (json.loads((at / "summary.json").read_text()) for at in (folder, RUNS / "finished"))
    for name in ("teacher", "mlp"):
        assert summary[name] == whole[name], "finished phases are taken from the folder"
    assert summary["rbm"]["epochs"] == whole["rbm"]["epochs"]
    # Another processor may round differently, which affects a few of 1,297 nodes.
    assert summary["rbm"]["test_accuracy"] == pytest.approx(whole["rbm"]["test_accuracy"], abs=0.02)


@pytest.mark.parametrize(
    ("former", "names"),
    [
        ("rbm.layer", ["FusedRbMLayer", "Routing"]),
        ("rbm.students", ["MLPStudent", "RbMStudent"]),
        ("rbm.hub", ["load"]),
        ("rbm.methods", ["METHODS", "Method"]),
        ("rbm.lessons", ["Learned", "Lesson"]),
        ("rbm.splits", ["per_class_masks"]),
        ("rbm.baselines.glnn", ["GLNNTraining"]),
        ("rbm.baselines.mlp", ["mlp_arguments"]),
    ],
)
def test_former_names_of_modules(former, names):
    module = importlib.import_module(former)
    assert all(hasattr(module, name) for name in names)


# The plugin shown in CONTRIBUTING.md of version 0.1.0, verbatim.
FORMER_PLUGIN = """
from rbm.baselines.glnn import GLNNTraining
from rbm.baselines.mlp import mlp_arguments
from rbm.lessons import Learned, Lesson
from rbm.methods import METHODS, Method
from rbm.students import MLPStudent


def learn_copycat(lesson: Lesson) -> Learned:
    settings = lesson.config.glnn
    arguments = mlp_arguments(lesson, settings)
    student = lesson.start(MLPStudent, arguments)
    learner = GLNNTraining(student, lesson.split, lesson.teaching, settings)
    return Learned(student, arguments, lesson.fit("copycat", learner, settings), None)


METHODS["copycat"] = Method("Copycat", ("teacher", "glnn"), learn_copycat)
"""


def test_a_former_plugin_trains_what_glnn_trains(monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "METHODS", dict(registry.METHODS))
    for module in (distillation, request):
        monkeypatch.setattr(module, "METHODS", registry.METHODS)
    monkeypatch.setattr(importlib.import_module("rbm.methods"), "METHODS", registry.METHODS)
    exec(FORMER_PLUGIN, {})
    config = Config().updated({"teacher": {"max_epochs": 3}, "glnn": {"max_epochs": 3}})
    found = rbm.distill(rbm.load_dataset("digits"), config=config, methods=["glnn", "copycat"], folder=tmp_path / "run")
    assert found.summary["copycat"] == found.summary["glnn"]
    assert type(rbm.load(tmp_path / "run")).__name__ == "MLPStudent"

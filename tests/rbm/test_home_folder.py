"""A leading ``~`` is the home folder in every path that Python code gives, as it is in a shell."""

import numpy as np
import pytest

import rbm
from rbm import hub
from rbm.config import Config
from rbm.distillation.report.finished import read_distillation
from rbm.experiments.results import read_rows
from rbm.experiments.runner import Experiment, run_experiment
from rbm.serving.export import export_student
from rbm.serving.grown_graph import predict_graph
from rbm.serving.latency import measure_run
from rbm.serving.prediction import predict_file
from rbm.training.run_folder import read_metrics

FEW = {"teacher": {"max_epochs": 1}, "mlp": {"max_epochs": 1}, "encoding": {"deepwalk": False}}


def test_paths_begin_at_home(tmp_path, monkeypatch):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(home))

    data = rbm.load_dataset("digits")
    config = Config(dataset="digits").updated(FEW)
    rbm.distill(data, config=config, methods=["mlp"], folder="~/run", cache="~/cache")
    student, rows = rbm.load("~/run"), data.x[:9].numpy()
    assert rbm.load_encodings("~/run") is None
    assert {line["phase"] for line in read_metrics("~/run")} == {"teacher", "labels", "mlp"}
    assert "mlp" in read_distillation("~/run").summary
    np.save(home / "rows.npy", rows)
    assert predict_file("~/run", "~/rows.npy", "~/classes.npy") == 9
    np.savez(home / "graph.npz", x=data.x.numpy(), edge_index=data.edge_index.numpy())
    assert predict_graph("~/run", "~/graph.npz", "~/graph.csv") == data.num_nodes
    assert export_student("~/run", path="~/student.pt2") == home / "student.pt2"
    assert export_student("~/run") == home / "run" / "student.pt2"
    measure_run("~/run", batch_sizes=(1,), repeats=1)

    experiment = Experiment(datasets=("digits",), seeds=(0,), methods=("mlp",), changes=FEW)
    assert run_experiment(experiment, "~/rows.csv", cache="~/cache") == read_rows("~/rows.csv")
    with pytest.raises(ValueError, match="folder is ~nosuchuser/run, but no such user is known here"):
        rbm.load("~nosuchuser/run")
    assert not [*elsewhere.iterdir()]

    pytest.importorskip("huggingface_hub")
    student.save_pretrained("~/saved", run="~/run")
    assert type(hub.load("~/saved")) is type(student)
    assert not [*elsewhere.iterdir()]

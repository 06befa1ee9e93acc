"""``rbm distill --resume`` continues a run with the methods that it was started with."""

import json

import rbm


def students(folder):
    """The method of the kept student, and those of the others."""
    described = json.loads((folder / "student.json").read_text())
    return described["method"], [*described["students"]]


def test_a_resumed_run_trains_its_own_methods(command, monkeypatch, tmp_path):
    """Regression test: without --method, it trained mlp and rbm, and dropped the students that it had."""
    monkeypatch.chdir(tmp_path)
    few = [f"--set={name}.max_epochs=2" for name in ("teacher", "glnn", "krd", "mlp")]
    status, _, err = command("distill", *few, "--features-only", "--method", "glnn,krd", "--out", "run", "--no-plots")
    assert status == 0, err
    resume = ("distill", "--resume", "--out", "run", "--no-plots")
    status, _, err = command(*resume, "--keep", "krd")
    assert (status, "krd: finished before" in err) == (0, True), err
    assert students(tmp_path / "run") == ("krd", ["glnn", "labels"])
    for further in (["--method", "mlp"], []):  # others, if they are named
        assert command(*resume, *further)[0] == 0
        assert students(tmp_path / "run") == ("mlp", ["labels"])


def test_a_run_of_an_earlier_version_is_resumed_with_the_default_methods(command, monkeypatch, tmp_path):
    """Such a run has no list of its methods."""
    monkeypatch.chdir(tmp_path)
    few = [f"--set={name}.max_epochs=2" for name in ("teacher", "glnn", "mlp", "rbm")]
    command("distill", *few, "--features-only", "--method", "glnn", "--out", "run", "--no-plots")
    path = tmp_path / "run" / "inputs.json"
    given = json.loads(path.read_text())
    assert given.pop("methods") == ["glnn"]
    path.write_text(json.dumps(given))
    assert command("distill", "--resume", "--out", "run", "--no-plots", "--keep", "rbm")[0] == 0
    assert students(tmp_path / "run") == ("rbm", ["mlp", "labels"])


def test_a_run_on_a_graph_from_python_is_resumed_from_its_folder(command, monkeypatch, tmp_path):
    """Regression test: the name of the graph was looked up among the datasets."""
    monkeypatch.chdir(tmp_path)
    few = {name: {"max_epochs": 2} for name in ("teacher", "glnn", "krd")}
    data = rbm.load_dataset("digits", seed=1)  # with masks of its own
    for name, folder in (("my digits", "a"), ("digits", "b"), ("org/mine", "c")):
        data.name = name
        config = rbm.Config().updated(few)
        run = rbm.distill(data, config=config, methods=["glnn", "krd"], folder=folder, plots=False, keep="glnn")
        status, out, err = command("distill", "--resume", "--out", folder, "--no-plots", "--keep", "krd")
        assert (status, "krd: finished before" in err) == (0, True), err
        assert f"{name}, transductive" in out
        assert students(tmp_path / folder) == ("krd", ["glnn", "labels"])
        assert f"{run.summary['krd']['test_accuracy']:.2%}" in out
    (tmp_path / "a" / "graph.safetensors").unlink()
    status, _, err = command("distill", "--resume", "--out", "a")
    assert status == 2
    assert "continue it from Python: rbm.distill(data, folder='a', resume=True)" in err

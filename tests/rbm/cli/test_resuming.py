"""``rbm distill --resume`` continues a run with the methods that it was started with."""

import json


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

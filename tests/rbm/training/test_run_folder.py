"""The run folder: nothing is lost by mistake, no foreign file is loaded, and nothing is unpickled."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from rbm import RbMStudent
from rbm.config import Config
from rbm.training import run_files
from rbm.training.run_folder import RunFolder, SavedStudent, load_student, read_metrics, save_students
from rbm.utils.files import write_atomically

ARGUMENTS = {"in_channels": 6, "hidden_channels": 8, "out_channels": 3, "num_experts": 4, "top_k": 2}


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run", Config())


@pytest.fixture
def finished(folder):
    student = RbMStudent(**ARGUMENTS).eval()
    folder.save_phase("rbm", student, {"val_accuracy": 0.5})
    save_students(folder.path, "rbm", {"rbm": SavedStudent(student, None)})
    return folder.path, student


def test_student_survives_the_disk(finished):
    path, student = finished
    loaded, x = load_student(path), torch.randn(9, 6)
    assert torch.equal(loaded(x), student(x))
    assert not loaded.training


def test_phase_result(folder):
    assert folder.finished("teacher") is None
    model = torch.nn.Linear(2, 2)
    folder.save_checkpoint({"phase": "teacher"})
    folder.save_phase("teacher", model, {"epochs": 3})
    assert folder.finished("teacher") == {"epochs": 3}
    assert folder.load_checkpoint() is None, "a finished phase needs no checkpoint"
    other = torch.nn.Linear(2, 2)
    folder.load_phase("teacher", other)
    assert torch.equal(other.weight, model.weight)


def test_a_model_without_parameters(folder):
    """As label propagation is; safetensors before 0.4.4 writes a file of no tensors that it cannot read."""
    folder.save_phase("teacher", torch.nn.Identity(), {"epochs": 3})
    assert folder.finished("teacher") == {"epochs": 3}


def test_existing_run_is_kept_unless_told_otherwise(folder):
    folder.append_metrics({"phase": "teacher", "epoch": 0})
    with pytest.raises(FileExistsError, match="exists and is not empty; use --resume to continue it, --overwrite"):
        RunFolder(folder.path, Config())
    assert read_metrics(RunFolder(folder.path, Config(), resume=True).path) == [{"phase": "teacher", "epoch": 0}]
    (folder.path / "notes.txt").write_text("mine")
    assert read_metrics(RunFolder(folder.path, Config(), overwrite=True).path) == []
    assert (folder.path / "notes.txt").read_text() == "mine"


def test_overwrite_leaves_foreign_folders_alone(tmp_path):
    (tmp_path / "thesis.json").write_text("{}")
    with pytest.raises(
        FileExistsError,
        match=r"is not a run folder of this version \(no valid run.json.*, so --overwrite leaves it alone",
    ):
        RunFolder(tmp_path, Config(), overwrite=True)
    assert (tmp_path / "thesis.json").exists()


FOREIGN = ("config.yaml", "notes.json", "photo.png", "log.jsonl", "model.safetensors", "checkpoint.pt", "x.partial")


def test_overwrite_removes_no_file_that_no_run_wrote(tmp_path):
    """Regression test: any folder with a config.yaml counted as a run, and files with a run's endings were removed."""
    for name in FOREIGN:
        (tmp_path / name).write_text("mine")
    with pytest.raises(FileExistsError, match="--overwrite leaves it alone; restore that file, use another --out"):
        RunFolder(tmp_path, Config(), overwrite=True)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys(FOREIGN, "mine")


def test_overwrite_removes_what_the_run_wrote_alone(folder):
    folder.save_phase("teacher", torch.nn.Linear(2, 2), {})
    folder.save_checkpoint({})
    folder.append_metrics({"phase": "teacher", "epoch": 0})
    (folder.path / ".summary.json-x1.partial").write_text("half")
    folder.write_text("summary.json", "{}")
    for name in FOREIGN[1:-2]:
        (folder.path / name).write_text("mine")
    RunFolder(folder.path, Config(), overwrite=True)
    left = {file.name for file in folder.path.iterdir()} - {".run.json.lock"}
    assert left == {"run.json", "config.yaml", *FOREIGN[1:-2]}


def test_resume_removes_what_a_killed_run_left_of_its_files(folder):
    folder.save_phase("teacher", torch.nn.Linear(2, 2), {})
    folder.save_checkpoint({})
    names = ("teacher.safetensors", "checkpoint.pt", "metrics.jsonl", "run.json")
    left = [folder.path / f".{name}-x1.partial" for name in names]
    others = [folder.path / f".{name}-x1.partial" for name in ("student.pt2", "model.safetensors")]
    for file in left + others:
        file.write_text("half")
    RunFolder(folder.path, Config(), resume=True)
    assert [file.exists() for file in left + others] == [False] * 4 + [True, True]


@pytest.mark.parametrize("names", [["../outside"], ["/etc/outside"], "config.yaml", [3], None])
def test_a_list_that_lies_removes_nothing(folder, names):
    (folder.path.parent / "outside").write_text("mine")
    (folder.path / "run.json").write_text(json.dumps({"format": 1, "files": names}))
    with pytest.raises(FileExistsError, match=r"no valid run\.json"):
        RunFolder(folder.path, Config(), overwrite=True)
    assert (folder.path / "config.yaml").is_file()
    assert (folder.path.parent / "outside").is_file()


def test_resume_needs_the_same_configuration(folder, tmp_path):
    changed = Config().updated({"seed": 3, "rbm": {"lr": 0.5}})
    with pytest.raises(ValueError, match=r"another configuration: seed \(was 0, now 3\); rbm.lr \(was 0.01, now 0.5\)"):
        RunFolder(folder.path, changed, resume=True)
    with pytest.raises(FileNotFoundError, match=r"has no config.yaml: there is no run to resume$"):
        RunFolder(tmp_path / "nothing", Config(), resume=True)


def test_a_run_that_was_killed_at_its_start(folder):
    """It has its list of files, perhaps half a configuration, and nothing to lose."""
    for again in ({"resume": True}, {}, {"overwrite": True}):
        (folder.path / "config.yaml").rename(folder.path / ".config.yaml-0123456789abcdef.partial")
        for name in (".run.lock", ".run.lock.pid", ".run.json-0123456789abcdef.partial"):
            (folder.path / name).touch()
        RunFolder(folder.path, Config().updated({"seed": 3}), **again)
        assert Config.from_yaml(folder.path / "config.yaml").seed == 3
        assert not list(folder.path.glob("*.partial"))


def test_a_run_that_lost_its_configuration(folder):
    """Its models may be those of other settings."""
    folder.save_tensors("teacher", {"weight": torch.zeros(1)})
    (folder.path / "config.yaml").unlink()
    with pytest.raises(FileNotFoundError, match="no run to resume; start it anew with --overwrite instead of --resume"):
        RunFolder(folder.path, Config(), resume=True)
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        RunFolder(folder.path, Config())
    RunFolder(folder.path, Config(), overwrite=True)


def test_metrics_that_a_kill_cut_short(folder):
    for phase, epoch in [("teacher", 0), ("teacher", 1), ("mlp", 0), ("mlp", 1), ("rbm", 0)]:
        folder.append_metrics({"phase": phase, "epoch": epoch})
    with open(folder.path / "metrics.jsonl", "a") as file:
        file.write('{"phase": "stu')
    assert len(read_metrics(folder.path)) == 5
    folder.keep_metrics("rbm", 0)
    folder.keep_metrics("mlp", 1)
    assert [(r["phase"], r["epoch"]) for r in read_metrics(folder.path)] == [("teacher", 0), ("teacher", 1), ("mlp", 0)]
    assert (folder.path / "metrics.jsonl").read_text().endswith("\n")


def test_write_is_all_or_nothing(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def fail(partial):
        partial.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "old"


def test_unfinished_run(folder):
    with pytest.raises(FileNotFoundError, match=r"holds no student.json: it is no run folder, or its run is not"):
        load_student(folder.path)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x04\x95pickle"])
def test_corrupt_weights(finished, content):
    path, _ = finished
    (path / "rbm.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"rbm.safetensors is not a readable safetensors file"):
        load_student(path)


def test_truncated_weights(finished):
    path, _ = finished
    weights = path / "rbm.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"rbm.safetensors is not a readable safetensors file"):
        load_student(path)


def test_foreign_weights(finished):
    path, student = finished
    save_file(student.state_dict(), path / "rbm.safetensors")
    with pytest.raises(ValueError, match="was not written by this package: its metadata lacks the key rbm"):
        load_student(path)


def test_weights_of_another_shape(finished):
    path, _ = finished
    description = json.loads((path / "student.json").read_text())
    description["arguments"]["hidden_channels"] = 16
    del description["checksum"]  # as after editing by hand
    (path / "student.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="does not fit RbMStudent"):
        load_student(path)


@pytest.mark.parametrize(
    "text", ["{", '{"class": "Evil", "arguments": {}}', '{"class": "RbMStudent", "arguments": {"a": 1}}']
)
def test_broken_description(finished, text):
    path, _ = finished
    (path / "student.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape("student.json does not describe a student of this package")):
        load_student(path)


class Malice:
    def __reduce__(self):
        return (open, ("/tmp/rbm-was-here", "w"))


def test_checkpoint_is_never_unpickled(folder, tmp_path):
    torch.save({"phase": "teacher", "evil": Malice()}, folder.path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"checkpoint.pt is no readable checkpoint"):
        folder.load_checkpoint()
    (folder.path / "checkpoint.pt").write_bytes(b"truncated")
    with pytest.raises(ValueError, match="delete it to start its phase anew"):
        folder.load_checkpoint()


def test_a_file_that_is_listed_twice_is_removed_once(folder):
    """Two processes may add the same name to the list at once."""
    run = json.loads((folder.path / "run.json").read_text())
    (folder.path / "run.json").write_text(json.dumps({**run, "files": [*run["files"], "config.yaml"]}))
    RunFolder(folder.path, Config(), overwrite=True)


def test_two_processes_list_a_file_once(folder, monkeypatch):
    path = folder.path / "student.pt2"

    class Late:
        """A lock that is free only when another process has listed the file."""

        def __init__(self, *_):
            pass

        def __enter__(self):
            run = json.loads((folder.path / "run.json").read_text())
            (folder.path / "run.json").write_text(json.dumps({**run, "files": [*run["files"], path.name]}))

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(run_files, "FileLock", Late)
    run_files.list_file(path)
    assert run_files.listed_files(folder.path).count(path.name) == 1


def test_a_folder_that_cannot_be_written_to_is_told_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda folder, mode: folder != tmp_path)
    for path in (tmp_path / "runs" / "digits", tmp_path):
        with pytest.raises(PermissionError, match=r"run folder .* no permission to write to .*; use another --out"):
            RunFolder(path, Config())
    assert not any(tmp_path.iterdir())

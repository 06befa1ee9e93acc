"""Files of a run that were changed after writing, by a disk, an editor or an attacker, are refused."""

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_runs import forget_files

import rbm
from rbm import RbMStudent
from rbm.config import Config
from rbm.nn.saved_student import describe
from rbm.nn.students import EnsembleStudent, MLPStudent, SIGNStudent
from rbm.training.run_folder import RunFolder, SavedStudent, load_encodings, read_metrics, save_students

SIZES = {"in_channels": 6, "hidden_channels": 8, "out_channels": 3, "num_experts": 4, "top_k": 2}
DESCRIPTIONS = {"run": "student.json", "hub": "config.json"}
WEIGHTS = {"run": "rbm.safetensors", "hub": "model.safetensors"}
RUNS = Path(__file__).parent.parent / "runs_of_0_1_0"


@pytest.fixture(params=["run", "hub"])
def saved(request, tmp_path):
    """A student in a run folder or in the Hub's layout, and which of the two it is."""
    student, folder = RbMStudent(**SIZES).eval(), tmp_path / "saved"
    if request.param == "hub":
        pytest.importorskip("huggingface_hub")
        student.save_pretrained(folder)
    else:
        run = RunFolder(folder, Config())
        run.save_phase("rbm", student, {"epochs": 3})
        run.save_tensors("encodings", {"encodings": torch.rand(30, 4)})
        save_students(folder, "rbm", {"rbm": SavedStudent(student, "encodings")})
    return folder, request.param


def flip(path: Path, place: int, bit: int = 6) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def test_a_flipped_bit_anywhere_in_a_student_is_told(saved):
    folder, kind = saved
    path, size = folder / WEIGHTS[kind], (folder / WEIGHTS[kind]).stat().st_size
    x, taken = torch.randn(9, 6), 0
    answers = rbm.load(folder)(x)
    for place in [*range(0, 600, 7), *range(600, size, 53)]:
        flip(path, place)
        with suppress(ValueError):
            assert torch.equal(rbm.load(folder)(x), answers)
            taken += 1  # for example a blank in the header
        flip(path, place)
    assert taken < 5


@pytest.mark.parametrize("name", ["rbm", "encodings"])
def test_a_file_of_another_run_is_told(tmp_path, name):
    """Weights and encodings of equal shapes fit; their predictions would mix two runs."""
    folders = [tmp_path / "ours", tmp_path / "theirs"]
    for folder in folders:
        run, student = RunFolder(folder, Config()), RbMStudent(**SIZES).eval()
        run.save_phase("rbm", student, {"epochs": 3})
        run.save_tensors("encodings", {"encodings": torch.rand(30, 4)})
        save_students(folder, "rbm", {"rbm": SavedStudent(student, "encodings")})
    ours, theirs = (folder / f"{name}.safetensors" for folder in folders)
    ours.write_bytes(theirs.read_bytes())
    read = rbm.load if name == "rbm" else load_encodings
    with pytest.raises(ValueError, match=rf"{name}.safetensors is not the file that .*student.json describes"):
        read(folders[0])
    forget_files(folders[0])
    read(folders[0])


def test_a_changed_description_is_told(saved):
    folder, kind = saved
    path = folder / DESCRIPTIONS[kind]
    path.write_text(path.read_text().replace('"top_k": 2', '"top_k": 3'))
    with pytest.raises(ValueError, match=rf"{path.name} is damaged: .*remove the line of the checksum where it was"):
        rbm.load(folder)


def test_a_description_that_was_changed_on_purpose_is_taken(saved):
    folder, kind = saved
    path = folder / DESCRIPTIONS[kind]
    content = json.loads(path.read_text())
    content["arguments"]["top_k"] = 3
    content["files"] = ["of another program"]
    del content["checksum"]
    path.write_text(json.dumps(content))
    assert rbm.load(folder).layers[0].top_k == 3


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_student_that_is_not_finite_is_refused(saved, number):
    folder, kind = saved
    student = RbMStudent(**SIZES)
    with torch.no_grad():
        student.layers[1].weight[0, 0, 0] = number
    if kind == "hub":
        student.save_pretrained(folder)
    else:
        RunFolder.save_phase(_unopened(folder), "rbm", student, {})
        save_students(folder, "rbm", {"rbm": SavedStudent(student, "encodings")})
    with pytest.raises(ValueError, match=rf"{WEIGHTS[kind]}: layers\.1\.weight holds NaN, infinity"):
        rbm.load(folder)


def _unopened(folder: Path) -> RunFolder:
    run = object.__new__(RunFolder)
    run.path = folder
    return run


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 10**7},
        {"out_channels": 10**12},
        {"hidden_channels": 10**12, "in_channels": 10**12},
        {"num_experts": 10**12},
        {"num_layers": -(10**30)},
        {"num_layers": "2"},
        {"in_channels": 6.0},
        {"norm": []},
    ],
    ids=str,
)
def test_sizes_that_the_weights_do_not_have_are_refused_at_once(saved, changes):
    folder, kind = saved
    path = folder / DESCRIPTIONS[kind]
    content = json.loads(path.read_text())
    content["arguments"] |= changes
    del content["checksum"]
    path.write_text(json.dumps(content))
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"holds arguments that RbMStudent does not take|does not fit RbMStudent"):
        rbm.load(folder)
    assert time.monotonic() - began < 10


def test_more_members_than_the_weights_have_are_refused_at_once(tmp_path):
    pytest.importorskip("huggingface_hub")
    EnsembleStudent(2, in_channels=6, hidden_channels=8, out_channels=3).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["arguments"]["members"] = 10**7
    del content["checksum"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"they describe more layers than .*model\.safetensors has tensors, 8$"):
        rbm.load(tmp_path)


def test_the_checksum_is_of_the_class_too():
    """Another class may take the same arguments and weights."""
    assert describe(MLPStudent(6, 8, 3))["checksum"] != describe(SIGNStudent(6, 8, 3))["checksum"]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "\xff", "3", "9" * 10_000, " " * 2**23])
def test_a_description_that_is_no_description(saved, text):
    folder, kind = saved
    (folder / DESCRIPTIONS[kind]).write_text(text, encoding="latin1")
    with pytest.raises(ValueError, match=rf"{DESCRIPTIONS[kind]} does not describe a student of this package"):
        rbm.load(folder)


def test_a_students_file_is_of_its_folder(saved):
    folder, kind = saved
    if kind == "run":
        content = json.loads((folder / "student.json").read_text())
        (folder / "student.json").write_text(json.dumps(content | {"method": "../rbm"}))
        with pytest.raises(ValueError, match=r"student\.json does not describe a student of this package"):
            rbm.load(folder)


def test_files_without_a_checksum_are_taken(saved):
    """Version 0.1.0 wrote such files; test_former_versions.py tests complete runs of it."""
    folder, kind = saved
    path, x = folder / WEIGHTS[kind], torch.randn(9, 6)
    answers = rbm.load(folder)(x)
    save_file(load_file(path), path, {"rbm": '{"epochs": 3}'} if kind == "run" else {"format": "pt"})
    assert torch.equal(rbm.load(folder)(x), answers)


# Encodings, results, metrics, checkpoints


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run", Config())
    folder.save_tensors("encodings", {"encodings": torch.rand(30, 4)})
    folder.save_phase("mlp", torch.nn.Linear(3, 2), {"epochs": 3, "val_accuracy": 0.5})
    folder.save_checkpoint({"phase": "rbm", "epoch": 4, "model": {"weight": torch.rand(50, 50)}})
    return folder


def test_damaged_encodings(run):
    path = run.path / "encodings.safetensors"
    flip(path, path.stat().st_size - 5)
    with pytest.raises(ValueError, match=r"encodings\.safetensors is damaged: .*checksum differs"):
        load_encodings(run.path)
    save_file({"encodings": torch.full((30, 4), torch.nan)}, path)
    with pytest.raises(ValueError, match=r"encodings\.safetensors: encodings holds NaN"):
        load_encodings(run.path)
    for tensors in ({"encodings": torch.rand(30)}, {"encodings": torch.ones(3, 4).long()}, {"codes": torch.rand(3, 4)}):
        save_file(tensors, path)
        with pytest.raises(ValueError, match=r"encodings\.safetensors holds no encodings of this package: it has"):
            load_encodings(run.path)
    save_file({"encodings": torch.ones(30, 4)}, path)
    assert load_encodings(run.path).shape == (30, 4), "version 0.1.0 wrote no checksum"


def test_encodings_of_no_folder(run, tmp_path):
    """None means a student of features alone, not a wrong path."""
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist; expected the run folder of a finished"):
        load_encodings(tmp_path / "nowhere")
    (run.path / "encodings.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no student\.json: it is no run folder, or its run is not"):
        load_encodings(run.path)
    rbm.MLPStudent(3, 4, 2).save_pretrained(tmp_path / "student")
    assert load_encodings(tmp_path / "student") is None


def test_a_damaged_phase(run):
    path = run.path / "mlp.safetensors"
    content = path.read_bytes()
    assert content.count(b"0.5") == 1
    path.write_bytes(content.replace(b"0.5", b"0.9"))
    with pytest.raises(ValueError, match=r"mlp\.safetensors is damaged: .*checksum differs"):
        run.finished("mlp")
    path.write_bytes(content.replace(b"checksum", b"chfcksum"))
    with pytest.raises(ValueError, match=r"mlp\.safetensors is damaged"):
        run.load_phase("mlp", torch.nn.Linear(3, 2))


def test_a_damaged_checkpoint_is_not_continued(run):
    path = run.path / "checkpoint.pt"
    numbers = run.load_checkpoint()["model"]["weight"].numpy().tobytes()
    flip(path, path.read_bytes().index(numbers) + 403)
    with pytest.raises(ValueError, match=r"checkpoint\.pt is no readable checkpoint .*checksum differs.*delete it"):
        run.load_checkpoint()


def test_a_checkpoint_of_something_else(run):
    for content in ([1], {"epoch": 3}, torch.ones(2)):
        torch.save(content, run.path / "checkpoint.pt")
        with pytest.raises(ValueError, match=r"checkpoint\.pt is no readable checkpoint \(it holds no state"):
            run.load_checkpoint()


@pytest.mark.parametrize("lost", ["model", "optimizer", "best", "rng", "wrong shape"])
def test_a_checkpoint_that_lacks_a_part(tmp_path, lost):
    folder = tmp_path / "run"
    shutil.copytree(RUNS / "killed", folder)
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    if lost == "wrong shape":
        state["model"] = {name: tensor[:1] for name, tensor in state["model"].items() if tensor.dim()}
    else:
        del state[lost]
    torch.save(state, folder / "checkpoint.pt")
    config = Config.from_yaml(folder / "config.yaml")
    with pytest.raises(ValueError, match=r"the checkpoint does not fit phase 'rbm' .*delete checkpoint.pt"):
        rbm.distill(rbm.load_dataset("digits"), config=config, folder=folder, methods=("mlp", "rbm"), resume=True)


@pytest.mark.parametrize(
    "line",
    ["{}", "[]", "3", '{"phase": "rbm"}', '{"phase": 3, "epoch": 1}', "\0" * 40, "[" * 100_000, '{"phase": "rbm", "ep'],
    ids=lambda line: line[:20],
)
def test_lines_that_are_no_epoch(run, line):
    for epoch in range(2):
        run.append_metrics({"phase": "rbm", "epoch": epoch})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write(line)
    assert len(read_metrics(run.path)) == 2, "a last line without an end is what a kill left"
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('\n{"phase": "rbm", "epoch": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 3 is .*, expected an epoch of a phase"):
        run.keep_metrics("rbm", 1)


def test_metrics_that_are_no_text(run):
    (run.path / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is not text in UTF-8"):
        read_metrics(run.path)
